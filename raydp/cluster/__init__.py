"""A search on a cluster, by Ray Jobs: submit, list, follow, stop. The cluster runs the driver; this machine may go.

``connection`` finds out about a cluster before anything is sent, ``package`` chooses what travels, ``submission`` acts.
What a run directory may show of itself elsewhere is :mod:`raydp.search.copies`' matter.
"""

from raydp.cluster.connection import Connection, connect
from raydp.cluster.submission import Job, Submission, find, follow, jobs, logs, receive, send, stop, submit

__all__ = [
    "Connection",
    "Job",
    "Submission",
    "connect",
    "find",
    "follow",
    "jobs",
    "logs",
    "receive",
    "send",
    "stop",
    "submit",
]

"""Budgets, mechanisms, accountants, calibration and plans. Imports neither models, Ray nor MLflow."""

from raydp.privacy.accountants import ACCOUNTANTS, Accountant, epsilon
from raydp.privacy.budget import ADJACENCIES, Adjacency, Budget
from raydp.privacy.cache import PlanCache
from raydp.privacy.calibration import calibrate
from raydp.privacy.ledger import Ledger, LedgerEntry, LedgerWriter
from raydp.privacy.mechanism import Mechanism, Phase, PhaseSpec
from raydp.privacy.noise import NOISE_CLAIM, NOISE_SOURCE, NoiseKey, poisson_members, poisson_sample
from raydp.privacy.plan import SPLITS, Interval, Plan

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "NOISE_CLAIM",
    "NOISE_SOURCE",
    "SPLITS",
    "Accountant",
    "Adjacency",
    "Budget",
    "Interval",
    "Ledger",
    "LedgerEntry",
    "LedgerWriter",
    "Mechanism",
    "NoiseKey",
    "Phase",
    "PhaseSpec",
    "Plan",
    "PlanCache",
    "calibrate",
    "epsilon",
    "poisson_members",
    "poisson_sample",
]

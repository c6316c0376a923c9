"""The driver's side of a search, without Ray: what is proposed next, and what becomes of what comes back.

Everything is written to the journal before it is acted on, so a session can be rebuilt from the run directory at any
moment: :meth:`Session.__init__` does nothing else.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from raydp.errors import CorruptFile, Infeasible, InvalidValue, RaydpError
from raydp.privacy.accountants.rdp import RunningRdp
from raydp.privacy.ledger import Ledger
from raydp.privacy.noise import NoiseKey
from raydp.privacy.plan import Interval, Plan
from raydp.privacy.selection import Subsample
from raydp.search import carrying, holdout, subsample
from raydp.search.definition import Search
from raydp.search.display import Display
from raydp.search.earlier import carried, earlier_of
from raydp.search.records import FINISHED, TrialRecord, key_of
from raydp.search.run_directory import RunDirectory
from raydp.search.sampling import Sampling
from raydp.search.secrecy import Terms
from raydp.search.spending import is_family, largest
from raydp.search.tracking import Tracker
from raydp.search.trainable import INTERRUPTED, Assignment

MAX_INFEASIBLE_IN_A_ROW = 100


class Session:
    """One driver at work on one run directory, whose lock it holds.

    Args:
        search: the definition.
        directory: the run directory, new or of an earlier driver.
        tracker, display: told about everything.
        clock: seconds; for the estimate of the time left.
        terms: what random stopping adds to the definition; None for a search of any other selection.
    """

    def __init__(
        self,
        search: Search,
        directory: RunDirectory,
        *,
        tracker: Tracker,
        display: Display,
        clock: Callable[[], float] = time.monotonic,
        terms: Terms | None = None,
    ) -> None:
        self.search, self.directory, self.terms = search, directory, terms
        self.failure: str | None = None  # why no more trials can be proposed, if it is an error
        self._tracker, self._display, self._clock = tracker, display, clock
        self._begun = clock()
        carrying.take_over(search, directory)
        earlier = earlier_of(directory)
        self._carried = carried(earlier)
        self._carried_members = {member for member, _ in self._carried if member is not None}
        self._sampling = Sampling(
            space=search.point_space,
            sampler=search.sampler,
            seed=search.seed if terms is None else terms.sampler_seed,
            directions=search.modes,
            warm_start=search.warm_start,
        )
        #: How many trials are trained in all: the search's, and what resumes added; infeasible ones do not count.
        extended = sum(int(event["trials"]) for event in directory.events() if event["event"] == "extended")
        self.target = (search.trials if terms is None else terms.runs) + extended
        records = directory.records()
        if earlier:
            lessons = carrying.lessons(search, earlier)
            if lessons.trials:
                self._sampling.learn(lessons.trials)
            self._display.note(f"{', '.join(each.name for each in earlier)}: {lessons.summary(search.sampler)}.")
        self._sampling.restore([record for record in records.values() if not record.final], metrics=search.metrics)
        self._records: dict[str, TrialRecord] = {}
        self._states: Counter[str] = Counter()  # how many records are in which state
        self._best: tuple[float, TrialRecord] | None = None
        self._final: TrialRecord | None = None  # the run after tuning on a subsample
        for record in records.values():
            self._keep(record)
        #: To be handed out before anything new: trials of an earlier driver, and those whose process died.
        self._unfinished = [key for key, record in records.items() if not record.finished]
        self._deaths: Counter[str] = Counter()
        self._spending: dict[int, RunningRdp] = {}  # of each member of a family; else all of it is in the first
        for key, record in records.items():
            if record.finished:
                self._spend(key)
        self._streak = 0
        self._finished_here = 0
        self._prepare_pairing()
        if isinstance(search.rule, Subsample) and self.left > 0:
            subsample.prepare_key(search, directory, records)

    @property
    def home(self) -> Path:
        """The run directory that a person resumes."""
        return self.directory.path if self.terms is None else self.terms.home

    def note(self, text: str) -> None:
        """Say something to whoever watches."""
        self._display.note(text)

    @property
    def left(self) -> int:
        """Trials that are still to be started or finished, the final run after tuning on a subsample among them."""
        new = self.target - self._feasible
        if self._sampling.size is not None:  # a grid may have fewer points than the search wants trials
            new = min(new, self._sampling.size - self._sampling.next_number)
        tuning = self._unended + max(0, new)
        return tuning + self._final_to_come(tuning > 0)

    def _final_to_come(self, tuning: bool) -> bool:
        """Whether there will be a final run; ``tuning``: trials are still to be started or finished."""
        wanted = isinstance(self.search.rule, Subsample) and self._final is None
        return wanted and (tuning or self._best is not None)

    def extend(self, trials: int) -> None:
        """Add trials to the search, durably."""
        if trials:
            self.directory.append({"event": "extended", "trials": trials})
            self.target += trials

    # What Tune asks and tells.

    def next_task(self) -> Assignment | None:
        """The next trial to train: an unfinished one that nobody is at, else a new proposal.

        None when there is nothing to hand out, which is for good only if :attr:`waiting` is False.

        Points without a plan are recorded with their reason, told to the sampler, and passed over. After a failure
        of the search nothing is handed out any more.
        """
        if self.failure is not None:
            return None
        if self._unfinished:
            record = self._records[self._unfinished.pop(0)]
            return self._task(record)
        while self._feasible < self.target:
            proposal = self._sampling.ask()
            if proposal is None:
                break
            record = self._propose(proposal.number, proposal.config)
            if record.state != "infeasible":
                self._streak = 0
                return self._task(record)
            self._streak += 1
            if self._streak >= MAX_INFEASIBLE_IN_A_ROW:
                self.failure = (
                    f"{self._streak} proposals in a row have no plan; the last: {record.reason} "
                    "Widen the space, or look at it with `raydp plan`."
                )
                return None
        if not self._unended and self._final_to_come(tuning=False):
            return self._propose_final()
        return None

    def started(self, key: str) -> None:
        """A process began (or began again) with the trial."""
        attempt = self._records[key].attempts + 1
        self.directory.append({"event": "started", "key": key, "attempt": attempt})
        self._keep(replace(self._records[key], state="running", attempts=attempt))
        self._tracker.trial_started(self._records[key])
        self._display.started(key, attempt)

    def progressed(self, key: str, item: Mapping[str, Any]) -> None:
        """The trial reported something that is durable."""
        self._tracker.log_metrics(key, item["step"], item["metrics"], seed=item["seed"])
        self._display.progress(key, item["fraction"], item["metrics"].get(self.search.metrics[0]))

    def finished(self, key: str, item: Mapping[str, Any]) -> None:
        """The trial ended in whatever way it says; if its storage failed, it stays unfinished and the search stops."""
        state, reason = item["state"], item["reason"]
        if state == INTERRUPTED:
            which = key if self.terms is None else ""
            remedy = f"When that is repaired: raydp resume {self.home}"
            self.failure = f"trial {which} cannot go on: {reason}\n{remedy}" if which else f"{reason}\n{remedy}"
            return
        metrics = {name: list(values) for name, values in item["metrics"].items()}
        number, final = self._records[key].number, self._records[key].final
        if state == "complete":
            record = replace(self._records[key], metrics={name: tuple(values) for name, values in metrics.items()})
            means = [record.mean(metric) for metric in self.search.metrics]
            if not (None not in means if final else self._sampling.complete(number, means)):
                state, reason = "diverged", "a metric is missing or not finite"
        elif state == "diverged" and not final:
            self._sampling.diverged(number, reason)
        elif not final:
            self._sampling.fail(number, reason)
        measured_on = self._measured_on()
        epsilon, heads = self._epsilon(key), self.directory.heads(key)
        holdout_heads = self.directory.heads(key, holdout.LEDGER)
        self.directory.append(
            {
                "event": "finished",
                "key": key,
                "state": state,
                "reason": reason,
                "metrics": metrics,
                "seconds": item["seconds"],
                "epsilon": {name: interval.to_json() for name, interval in epsilon.items()},
                "measured_on": measured_on,
                "heads": heads,
                **({"holdout_heads": holdout_heads} if self._records[key].holdout_plan else {}),
            }
        )
        self._keep(
            replace(
                self._records[key],
                state=state,
                reason=reason,
                metrics={name: tuple(values) for name, values in metrics.items()},
                seconds=item["seconds"],
                epsilon=epsilon,
                measured_on=measured_on,
                heads=heads,
                holdout_heads=holdout_heads,
            )
        )
        self._spend(key)
        self._finished_here += 1
        self._tracker.trial_finished(self._records[key])
        self._display.finished(self._records[key])
        self._show_total()

    @property
    def waiting(self) -> bool:
        """Whether a trial is at work, whose process may die so that the trial has to be handed out again."""
        return self.failure is None and self._unended > 0

    def died(self, key: str) -> None:
        """The trial's process died: the trial is handed out again, or failed if that has happened too often."""
        self._deaths[key] += 1
        if self._deaths[key] <= self.search.resources.retries:
            self._unfinished.append(key)
            return
        self.finished(
            key,
            {
                "state": "failed",
                "reason": self._cause_of_death(key),
                "metrics": {},
                "seconds": None,
            },
        )
        for position in range(self.search.seeds):
            NoiseKey.destroy(self.directory.secrets / f"{key}-{position}.key")

    def _cause_of_death(self, key: str) -> str:
        times = self._deaths[key]
        reason = f"its process died {times} time{'' if times == 1 else 's'}"
        hung = [file.name for file in self.directory.trial_directory(key).glob("hang-*.txt") if file.stat().st_size]
        if not hung:
            return reason
        return f"{reason}, having worked {self.search.resources.time_limit:g} s without a report (see {min(hung)})"

    def close(self) -> None:
        """Destroy the secrets that runs share once nothing will be replayed any more."""
        if self.left == 0:
            NoiseKey.destroy(self.directory.secrets / "pairing.key")
            NoiseKey.destroy(subsample.key_file(self.directory))

    # Inside.

    def _propose(self, number: int, config: Mapping[str, Any]) -> TrialRecord:
        key = key_of(number)
        try:
            plan = self.search.plan_for(config, None if self.terms is None else self.terms.budget)
            held = self.search.holdout_plan_for(plan, None if self.terms is None else self.terms.holdout_budget)
            if isinstance(self.search.rule, Subsample):  # it must be possible to carry the config over
                chosen, hyperparameters, _ = self.search.point(self.search.final_config(config))
                chosen.phases(hyperparameters, population=self.search.population(final=True))
        except (Infeasible, InvalidValue) as error:
            self._sampling.infeasible(number, str(error))
            self.directory.append(
                {"event": "infeasible", "key": key, "number": number, "config": dict(config), "reason": str(error)}
            )
            record = TrialRecord(key=key, number=number, state="infeasible", config=config, reason=str(error))
            self._display.infeasible(record)
        else:
            record = self._admit(number, config, plan, held)
        self._keep(record)
        self._tracker.trial_proposed(record)
        return record

    def _admit(
        self, number: int, config: Mapping[str, Any], plan: Plan, held: Plan | None, *, final: bool = False
    ) -> TrialRecord:
        """Write down a trial that may run."""
        key = key_of(number)
        relative = self.directory.trial_directory(key).relative_to(self.directory.path)
        self.directory.write_json(relative / "config.json", {**self.search.fixed, **config})
        self.directory.write_json(relative / "plan.json", plan.to_json())
        event = {"event": "proposed", "key": key, "number": number, "config": dict(config), "plan": plan.digest}
        if held is not None:
            self.directory.write_json(relative / holdout.PLAN, held.to_json())
            event["holdout_plan"] = held.digest
        if final:
            event["final"] = True
        self.directory.append(event)
        record = TrialRecord(
            key=key,
            number=number,
            state="proposed",
            config=config,
            plan=plan,
            holdout_plan=None if held is None else held.digest,
            final=final,
        )
        self._display.proposed(record)
        return record

    def _propose_final(self) -> Assignment | None:
        """The final run, with the config of the best trial for which there is a plan."""
        number, reason = max(record.number for record in self._records.values()) + 1, ""
        for best in self._ranked():
            try:
                config = self.search.final_config(best.config)
                plan = self.search.plan_for(config, final=True)
                held = self.search.holdout_plan_for(plan)
            except (Infeasible, InvalidValue) as error:
                reason = str(error)
                continue
            record = self._admit(number, config, plan, held, final=True)
            self._keep(record)
            self._tracker.trial_proposed(record)
            return self._task(record)
        self.failure = f"no config of a finished trial has a plan for the final run; the last: {reason}"
        return None

    def _task(self, record: TrialRecord) -> Assignment:
        search, resources = self.search, self.search.resources
        chosen, _, values = search.point(record.config)
        return Assignment(
            directory=str(self.directory.path),
            key=record.key,
            plan="" if record.plan is None else record.plan.digest,
            method=chosen.name,
            config=values,
            seeds=tuple(search.seed + position for position in range(1 if record.final else search.seeds)),
            data=search.data_source,
            data_limit=search.data_limit,
            task=search.task_name,
            public=search.public_source,
            public_limit=search.public_limit,
            model=search.model_name(),
            paired=search.paired,
            insecure_seed=search.insecure_seed,
            reports=search.reports,
            micro_batch=search.micro_batch,
            engine=search.engine,
            precision=search.precision,
            threads=resources.cpus_per_worker,
            device="cuda" if resources.gpus_per_worker else "cpu",
            workers=resources.workers,
            gpus=resources.gpus_per_worker,
            time_limit=resources.time_limit,
            holdout_plan=record.holdout_plan,
            metric=None if record.holdout_plan is None else search.metrics[0],
            part=subsample.part_of(search, final=record.final),
            fraction=search.rule.fraction if isinstance(search.rule, Subsample) else None,
        )

    def _prepare_pairing(self) -> None:
        if not self.search.paired:
            return
        path = self.directory.secrets / "pairing.key"
        if path.exists():
            return
        if self._unfinished:
            raise RaydpError(
                f"{path} is gone, so the unfinished trials {self._unfinished} cannot go on with their noise."
            )
        NoiseKey.generate().save(path)

    def _ledgers(self, key: str) -> dict[int, Ledger | None]:
        """Of the trial's runs, by seeds' positions; None for a damaged one, which counts as its whole plan."""
        found: dict[int, Ledger | None] = {}
        for position, path in self.directory.runs(key):
            file = path / "ledger.jsonl"
            if file.exists():
                try:
                    found[position] = Ledger.read(file)
                except CorruptFile:
                    found[position] = None
        return found

    def _spend(self, key: str) -> None:
        """Add a finished trial to the running total."""
        plan, family = self._records[key].plan, is_family(self.directory.definition)
        whole = () if plan is None else plan.mechanisms
        for position, ledger in self._ledgers(key).items():
            self._spent_by(position if family else 0).add(whole if ledger is None else ledger.mechanisms)

    def _spent_by(self, member: int) -> RunningRdp:
        """The running total of a member, which begins with what earlier searches spent on it."""
        if member not in self._spending:
            self._spending[member] = RunningRdp()
            for concerned, spent in self._carried:
                if concerned is None or concerned == member:
                    self._spending[member].add(spent)
        return self._spending[member]

    def _epsilon(self, key: str) -> dict[str, Interval]:
        """Bounds of the trial's costliest run: the plan's certificate if a run was finished, else from the ledgers."""
        plan, ledgers = self._records[key].plan, list(self._ledgers(key).values())
        if plan is None:
            return {}
        if any(x is None or all(x.steps(phase.name) == phase.steps for phase in plan.phases) for x in ledgers):
            return dict(plan.certificate)
        found = [ledger.epsilon(plan.accountant) for ledger in ledgers if ledger is not None and ledger.mechanisms]
        if not found:
            return {}
        return {plan.accountant: max(found, key=lambda interval: interval.upper)}

    def _measured_on(self) -> str:
        from raydp import data

        return holdout.label(self.search, data.load(self.search.data, limit=self.search.data_limit))

    def _show_total(self) -> None:
        seconds = (self._clock() - self._begun) / self._finished_here
        self._display.total(
            done=self._states["complete"],
            failed=sum(self._states[state] for state in ("failed", "diverged", "stopped")),
            infeasible=self._states["infeasible"],
            best=self._shown(),
            epsilon_search=self._total(),
            eta=seconds * self.left,
        )

    def _shown(self) -> TrialRecord | None:
        """What is shown as the best: the final run if it is complete."""
        if self._final is not None and self._final.state == "complete":
            return self._final
        return None if self._best is None else self._best[1]

    def _total(self) -> Interval:
        """Of all finished trials: the largest of the members, see :func:`raydp.search.spending.compositions`."""
        budget = self.search.budget
        totals = [self._spent_by(member) for member in {0, *self._spending, *self._carried_members}]
        return largest(total.epsilon(delta=budget.delta, adjacency=budget.adjacency) for total in totals)

    @property
    def _unended(self) -> int:
        return sum(count for state, count in self._states.items() if state not in FINISHED)

    @property
    def _feasible(self) -> int:
        """How many trials count towards the target."""
        return len(self._records) - self._states["infeasible"] - (self._final is not None)

    def _keep(self, record: TrialRecord) -> None:
        """Take the record in place of the trial's earlier one."""
        if record.key in self._records:
            self._states[self._records[record.key].state] -= 1
        self._states[record.state] += 1
        self._records[record.key] = record
        if record.final:
            self._final = record
            return
        value = record.mean(self.search.metrics[0]) if record.state == "complete" else None
        if value is not None:
            score = value if self.search.modes[0] == "max" else -value
            if self._best is None or score > self._best[0]:
                self._best = (score, record)

    def _ranked(self) -> list[TrialRecord]:
        """The complete trials, the best by the first metric first; of equals the earliest."""
        metric, sign = self.search.metrics[0], 1 if self.search.modes[0] == "max" else -1
        scored = [(r.mean(metric), r) for r in self._records.values() if r.state == "complete" and not r.final]
        known = [(sign * value, record) for value, record in scored if value is not None]
        return [record for _, record in sorted(known, key=lambda pair: -pair[0])]


def task_to_json(task: Assignment) -> str:
    """The task as Tune's config carries it."""
    return json.dumps(asdict(task))

"""What a sampler reads of a search's past: all of a short one, a bounded part of a long one.

A proposal must not cost more the longer a search runs. Optuna's samplers read every trial at every proposal, so TPE's
time grows with their number. Here they see at most :data:`WINDOW` of the finished trials: the best :data:`BEST` and the
latest others. TPE models the best tenth of the trials, at most 25, against the rest
(``optuna.samplers._tpe.sampler.default_gamma``), and weighs the rest the less the older they are. 250 is the least
window in which a tenth is 25, so its good trials are the same as with the whole past, and only its model of the bad
ones forgets.

What is shown depends on which trials were told what, not on the order or on restarts.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Container, Mapping, Sequence

from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.storages import InMemoryStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

BEST = 25
WINDOW = 250
_TOLD = (TrialState.COMPLETE, TrialState.PRUNED)


class History(InMemoryStorage):
    """The storage of one study with one objective, of which :meth:`get_all_trials` returns a bounded part.

    Trials that are not finished are always part of it. Trials whose constraint was broken are never among the best.

    Args:
        window: finished trials that are shown; the best :data:`BEST` and the latest others.
    """

    def __init__(self, window: int = WINDOW) -> None:
        super().__init__()
        self._window = window
        self._open: set[int] = set()
        self._best: list[tuple[float, int]] = []  # (what is minimised, trial id), sorted
        self._finished: list[int] = []  # trial ids, sorted; ids are numbers, for there is one study
        self._common: dict[str, BaseDistribution] | None = None

    @property
    def common_space(self) -> Mapping[str, BaseDistribution]:
        """The hyperparameters that every told trial has, each with the same distribution, by name."""
        return dict(sorted((self._common or {}).items()))

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        trial_id = super().create_new_trial(study_id, template_trial)
        self._note(study_id, self.get_trial(trial_id))
        return trial_id

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        changed = super().set_trial_state_values(trial_id, state, values)
        self._note(0, self.get_trial(trial_id))
        return changed

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        chosen = set(self._open)
        if states is None or any(state.is_finished() and state in states for state in TrialState):
            chosen.update(trial_id for _, trial_id in self._best)
            for trial_id in reversed(self._finished):
                if len(chosen) - len(self._open) >= self._window:
                    break
                chosen.add(trial_id)
        trials = [self.get_trial(trial_id) for trial_id in sorted(chosen)]
        found = trials if states is None else [trial for trial in trials if trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def _note(self, study_id: int, trial: FrozenTrial) -> None:
        if not trial.state.is_finished():
            self._open.add(trial._trial_id)
            return
        self._open.discard(trial._trial_id)
        bisect.insort(self._finished, trial._trial_id)
        if trial.state not in _TOLD:
            return
        if self._common is None:
            self._common = dict(trial.distributions)
        else:
            own = trial.distributions
            self._common = {name: kind for name, kind in self._common.items() if own.get(name) == kind}
        if trial.state == TrialState.COMPLETE and all(value <= 0 for value in trial.constraints.values()):
            assert trial.value is not None
            maximised = self.get_study_directions(study_id)[0] == StudyDirection.MAXIMIZE
            bisect.insort(self._best, (-trial.value if maximised else trial.value, trial._trial_id))
            del self._best[BEST:]


class HistoryTpe(TPESampler):
    """Optuna's TPE, told which hyperparameters the past has in common instead of looking through all of it."""

    def __init__(self, *, seed: int, history: History) -> None:
        super().__init__(seed=seed)
        self._history = history

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: kind for name, kind in self._history.common_space.items() if not kind.single()}

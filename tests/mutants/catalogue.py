"""Each mutant: one small wrong change of the source, and the tests of which at least one must fail under it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A text replacement in one file.

    Attributes:
        name: says what is wrong.
        file: below ``raydp/``.
        old, new: ``old`` must occur exactly once in the file.
        tests: pytest arguments below ``tests/``; the first that fails has caught the mutant.
        fast: belongs to the subset that the ordinary test run kills.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    fast: bool = False


_STEP = "training/test_step.py"
_BOUND = "geometry/test_bound.py"
_LENGTHS = "geometry/test_lengths.py"
_RANK_ONE = "geometry/test_rank_one.py"
_NOISE = "privacy/test_noise.py"
_STREAM = "privacy/test_stream.py"
_LEDGER = "privacy/test_ledger.py"
_RUN = "training/test_run.py"
_MANY = "training/test_many_workers.py"
_SAME = f"{_MANY}::test_one_two_and_four_workers_execute_the_same_run"
_TYPES = "data/test_types.py"
_CALIBRATION = "privacy/test_calibration.py"
_HOLDOUT = "training/test_holdout.py"
_SUBSAMPLE = "search/test_subsample.py"
_SUBSAMPLE_BOUND = "privacy/test_selection_subsample.py"

MUTANTS = (
    # The private step.
    Mutant(
        name="noise halved",
        file="training/step.py",
        old="math.nextafter(phase.noise_std, math.inf) / phase.spacing",
        new="math.nextafter(phase.noise_std, math.inf) / phase.spacing / 2",
        tests=(_STEP,),
        fast=True,
    ),
    Mutant(
        name="noise left out",
        file="training/step.py",
        old="noisy = torch.from_numpy(draws).add_(shifted(sums[place], bits))",
        new="noisy = shifted(sums[place], bits)",
        tests=(_STEP,),
    ),
    Mutant(
        name="noise not scaled by the clip norm",
        file="privacy/mechanism.py",
        old="return self.noise_multiplier * self.clip_norm",
        new="return self.noise_multiplier",
        tests=(_STEP,),
    ),
    Mutant(
        name="clip norm ignored",
        file="geometry/clipping.py",
        old=".clamp(max=1 / unit).to(dtype)",
        new=".clamp(min=1 / unit, max=1 / unit).to(dtype)",
        tests=(_STEP,),
        fast=True,
    ),
    Mutant(
        name="short vectors lengthened to the clip norm",
        file="geometry/clipping.py",
        old=".clamp(max=1 / unit).to(dtype)",
        new=".to(dtype)",
        tests=(_STEP,),
    ),
    Mutant(
        name="each tensor clipped by itself",
        file="geometry/clipping.py",
        old="return torch.linalg.vector_norm(torch.stack([example_norms(part) for part in coordinates]), dim=0)",
        new="return torch.stack([example_norms(part) for part in coordinates]).amax(dim=0)",
        tests=(_STEP,),
    ),
    Mutant(
        name="clipped to the square of the norm",
        file="geometry/clipping.py",
        old="(clip_norm / unit * _INSIDE / norms.clamp",
        new="(clip_norm / unit * _INSIDE / norms.sqrt().clamp",
        tests=(_STEP,),
    ),
    Mutant(
        name="an example that is not finite counts",
        file="training/step.py",
        old="if not bool(finite.all()):  # such an example contributes zero",
        new="if False and not bool(finite.all()):  # such an example contributes zero",
        tests=(_STEP,),
    ),
    Mutant(
        name="an example that is not finite counts in a measured sum",
        file="training/step.py",
        old="if not bool(finite.all()):  # 0 · inf",
        new="if False and not bool(finite.all()):  # 0 · inf",
        tests=(_LENGTHS,),
    ),
    Mutant(
        name="a measured sum clipped to twice the norm",
        file="training/step.py",
        old="within = self.clip_norm * (1 - margin)",
        new="within = self.clip_norm * 2",
        tests=(_LENGTHS, _BOUND),
    ),
    Mutant(
        name="a measured sum leaves no room for its rounding",
        file="training/step.py",
        old="within = self.clip_norm * (1 - margin)",
        new="within = self.clip_norm",
        tests=(_LENGTHS, _BOUND),
    ),
    Mutant(
        name="clipped vectors rounded away from zero",
        file="training/step.py",
        old="(columns * scales).to(kind)",
        new="(columns * scales + (columns * scales).sign()).to(kind)",
        tests=(_STEP,),
    ),
    Mutant(
        name="noise in each micro-batch",
        file="training/step.py",
        old="                total.add(gradients)\n",
        new="                total.add(gradients)\n"
        "                found = release(total, phase=phase, step=step, key=key)\n"
        "                for part, noisy in zip(total.total, found, strict=True):\n"
        "                    part.copy_((noisy.double() * phase.batch_size / phase.spacing).round())\n",
        tests=(_STEP,),
    ),
    Mutant(
        name="no noise on an empty batch",
        file="training/step.py",
        old="    released = []\n    for index, (total, bits) in enumerate(clipped.sums()):",
        new="    released = []\n"
        "    if not any(bool(part.any()) for part in clipped.total):\n"
        "        return [part.float() for part in clipped.units()]\n"
        "    for index, (total, bits) in enumerate(clipped.sums()):",
        tests=(_STEP,),
        fast=True,
    ),
    Mutant(
        name="divided by the realised batch size",
        file="training/step.py",
        old="                total.add(gradients)\n            break",
        new="                total.add(gradients)\n"
        "                from dataclasses import replace\n"
        "                phase = replace(phase, spec=replace(phase.spec, batch_size=max(1, len(gradients[0]))))\n"
        "            break",
        tests=(_STEP,),
    ),
    Mutant(
        name="the same noise at every step",
        file="training/step.py",
        old='"noise", phase.name, step, index)',
        new='"noise", phase.name, 0, index)',
        tests=(_STEP,),
        fast=True,
    ),
    Mutant(
        name="the same noise in two phases",
        file="training/step.py",
        old='"noise", phase.name, step, index)',
        new='"noise", step, index)',
        tests=(_STEP,),
    ),
    Mutant(
        name="the same noise for every tensor",
        file="training/step.py",
        old='"noise", phase.name, step, index)',
        new='"noise", phase.name, step)',
        tests=(_STEP,),
    ),
    Mutant(
        name="augmented copies clipped one by one",
        file="training/gradients.py",
        old="return [dense(gradient).unflatten(0, (-1, multiplicity)).mean(dim=1) for gradient in gradients]",
        new="return list(gradients)",
        tests=("training/test_gradients.py",),
    ),
    # Keys, noise and samplers.
    Mutant(
        name="noise that follows from the seed",
        file="training/run.py",
        old="            NoiseKey.generate().save(spec.key_file)",
        new="            NoiseKey.insecure(spec.seed).save(spec.key_file)",
        tests=(_RUN,),
    ),
    Mutant(
        name="the key outlives its run",
        file="training/run.py",
        old="            NoiseKey.destroy(self.spec.key_file)",
        new="            pass",
        tests=(_RUN,),
    ),
    Mutant(
        name="a key that the group may read",
        file="privacy/noise.py",
        old="os.fchmod(descriptor, 0o600)",
        new="os.fchmod(descriptor, 0o640)",
        tests=(_NOISE,),
    ),
    Mutant(
        name="a new key for steps that were spent with another",
        file="training/run.py",
        old="        if self.ledger.ledger.entries:\n",
        new="        if False:\n",
        tests=(_RUN,),
    ),
    Mutant(
        name="normals rounded by floating point alone",
        file="privacy/stream.py",
        old="        for block, place in np.argwhere(doubtful.numpy()).tolist():",
        new="        for block, place in ():",
        tests=(_STREAM,),
    ),
    Mutant(
        name="sine and cosine of one angle confused",
        file="privacy/stream.py",
        old="torch.mul(radius, angle.sin_(), out=pairs[:, 1])",
        new="torch.mul(radius, angle.cos_(), out=pairs[:, 1])",
        tests=(_STREAM,),
    ),
    Mutant(
        name="a sample of fixed size instead of Poisson's",
        file="privacy/noise.py",
        old="    return np.flatnonzero(takes_part if members is None else takes_part & members).astype(np.int64)",
        new="    count = phase.batch_size\n"
        '    words = key.generator("sample", phase.name, step).words(len(takes_part))\n'
        "    return np.sort(np.argsort(words)[:count]).astype(np.int64)",
        tests=(_NOISE,),
        fast=True,
    ),
    Mutant(
        name="examples sampled twice as often as planned",
        file="privacy/noise.py",
        old=".below(phase.sample_rate, count)",
        new=".below(min(1.0, 2 * phase.sample_rate), count)",
        tests=(_NOISE,),
    ),
    Mutant(
        name="the same sample at every step",
        file="privacy/noise.py",
        old='key.generator("sample", phase.name, step)',
        new='key.generator("sample", phase.name)',
        tests=(_NOISE,),
    ),
    Mutant(
        name="batches without a ledger entry",
        file="data/types.py",
        old="        ledger.record(phase.name, step)\n",
        new="",
        tests=(_TYPES,),
    ),
    Mutant(
        name="the query before its ledger entry",
        file="data/types.py",
        old="        ledger.record(phase.name, step)\n"
        "        indices = torch.from_numpy(poisson_sample(key, phase, step, self.__members))\n",
        new="        indices = torch.from_numpy(poisson_sample(key, phase, step, self.__members))\n"
        "        ledger.record(phase.name, step)\n",
        tests=(_TYPES,),
    ),
    # Geometries and methods.
    Mutant(
        name="what was released is changed on its way to the weights",
        file="geometry/support.py",
        old="        return list(released)",
        new="        return [part + 1e-3 for part in released]",
        tests=("methods/test_two_phase.py",),
    ),
    Mutant(
        name="coordinates frozen by the support move",
        file="training/optimizer.py",
        old="parameter.view(-1)[self._support[position]] = leaf",
        new="parameter.view(-1)[: len(leaf)] = leaf",
        tests=("methods/test_two_phase.py",),
    ),
    Mutant(
        name="outer products rounded away from zero",
        file="geometry/rank_one.py",
        old=".unsqueeze(1)).trunc_()",
        new=".unsqueeze(1)).ceil_()",
        tests=(_RANK_ONE,),
    ),
    Mutant(
        name="outer products measured on their rows alone",
        file="geometry/rank_one.py",
        old="self.rows.double().square().sum(dim=1) * self.columns.double().square().sum(dim=1)",
        new="self.rows.double().square().sum(dim=1)",
        tests=(_RANK_ONE,),
    ),
    Mutant(
        name="frozen entries of outer products count",
        file="training/step.py",
        old="part.squares(geometry.weights(index, self.shapes[index]))",
        new="part.squares()",
        tests=(_RANK_ONE,),
    ),
    Mutant(
        name="whitened outer products measured without the bias",
        file="geometry/lengths.py",
        old="columns.new_ones(len(columns), 1)",
        new="columns.new_zeros(len(columns), 1)",
        tests=(_RANK_ONE,),
    ),
    Mutant(
        name="sums of outer products beyond what is exact",
        file="geometry/rank_one.py",
        old="_EXAMPLES_AT_ONCE = 2 ** (53 - PRODUCT_BITS)",
        new="_EXAMPLES_AT_ONCE = 2**20",
        tests=(_RANK_ONE,),
    ),
    Mutant(
        name="what was summed before memory ran out counts twice",
        file="training/step.py",
        old="    while True:\n        total = ClippedSum(\n"
        "            geometry=geometry, clip_norm=phase.clip_norm, spacing=phase.spacing, device=device, "
        "shapes=shapes\n        )\n",
        new="    total = ClippedSum(\n"
        "        geometry=geometry, clip_norm=phase.clip_norm, spacing=phase.spacing, device=device, shapes=shapes\n"
        "    )\n    while True:\n",
        tests=("training/test_memory.py",),
    ),
    Mutant(
        name="whitened twice",
        file="geometry/whitening.py",
        old="    power = 0.5\n",
        new="    power = 1.0\n",
        tests=("geometry/test_whitening.py",),
    ),
    Mutant(
        name="subspace embeddings not clipped",
        file="geometry/subspace.py",
        old="return unit_ball(embeddings, self.embedding_clip_norm) +",
        new="return [part / self.embedding_clip_norm for part in embeddings] +",
        tests=(_BOUND,),
    ),
    Mutant(
        name="support chosen from un-noised gradients",
        file="training/run.py",
        old="        self.policy.observe(phase.name, step, released)\n",
        new="        import dataclasses\n"
        "        batch = self.dataset.private.sample(key=key, phase=phase, step=step, ledger=self.ledger)\n"
        "        bare = private_gradient(\n"
        "            self._gradients(batch, phase, step, key),\n"
        "            geometry=geometry,\n"
        "            phase=dataclasses.replace(phase, noise_multiplier=1e-12),\n"
        "            step=step,\n"
        "            key=key,\n"
        "        )\n"
        "        self.policy.observe(phase.name, step, bare)\n",
        tests=("training/test_run.py::test_a_policy_sees_what_was_released_and_nothing_else",),
    ),
    # The ledger and the release barrier.
    Mutant(
        name="a replayed step counted again",
        file="privacy/ledger.py",
        old="        if step < count:\n            return\n",
        new="        if step < count:\n            step = count\n",
        tests=(_LEDGER,),
        fast=True,
    ),
    Mutant(
        name="commit without making durable",
        file="privacy/ledger.py",
        old="                _write(self._file.fileno(), lines)\n                os.fsync(self._file.fileno())",
        new="                _write(self._file.fileno(), lines)",
        tests=(_LEDGER,),
    ),
    Mutant(
        name="a step more than planned",
        file="privacy/ledger.py",
        old="            if step >= phase.steps:",
        new="            if step > phase.steps:",
        tests=(_LEDGER,),
    ),
    Mutant(
        name="a checkpoint visible before the ledger",
        file="training/run.py",
        old="        self.ledger.commit()\n        checkpoint.save(self.spec.directory, self.step, self._state())",
        new="        checkpoint.save(self.spec.directory, self.step, self._state())\n        self.ledger.commit()",
        tests=(_RUN,),
    ),
    # Several workers.
    Mutant(
        name="each worker releases its own part of the batch",
        file="training/step.py",
        old="    workers.sum(total.total)\n",
        new="",
        tests=(_SAME,),
    ),
    Mutant(
        name="each worker reads the whole batch",
        file="training/run.py",
        old="for part in parts[own_part(len(parts), self.workers)]",
        new="for part in parts",
        tests=(_SAME,),
    ),
    Mutant(
        name="noise that follows from the rank",
        file="training/run.py",
        old="            NoiseKey.generate().save(spec.key_file)\n        self.workers.wait()",
        new="            NoiseKey.generate().save(spec.key_file)\n        self.workers.wait()\n"
        "        if self.workers.rank:\n"
        "            return NoiseKey.generate()",
        tests=(f"{_MANY}::test_a_killed_worker_leaves_a_run_that_one_worker_resumes_to_the_same_end",),
    ),
    Mutant(
        name="weights that drifted apart are released",
        file="training/run.py",
        old="        self._check_equal_weights()\n",
        new="",
        tests=(f"{_MANY}::test_weights_that_drifted_apart_are_never_reported",),
    ),
    Mutant(
        name="a worker that fails does not tell the others",
        file="training/workers.py",
        old="        workers.leave(error)\n",
        new="",
        tests=("training/test_workers.py",),
    ),
    # Plans, calibration and accountants.
    Mutant(
        name="the plan's rate from sizes that are not its own",
        file="privacy/mechanism.py",
        old="        return self.batch_size / self.population\n",
        new="        return self.batch_size / (self.population + 1)\n",
        tests=("privacy/test_mechanism.py",),
    ),
    Mutant(
        name="a plan for other sizes trains",
        file="training/run.py",
        old="            if phase.spec.population != population:",
        new="            if False:",
        tests=(_RUN,),
    ),
    Mutant(
        name="the composed split forgets a phase",
        file="privacy/calibration.py",
        old="    fixed = tuple(phase.mechanism for phase in solved)\n",
        new="    fixed = tuple(phase.mechanism for phase in solved[1:])\n",
        tests=(_CALIBRATION,),
    ),
    Mutant(
        name="sigma a hair too small",
        file="privacy/calibration.py",
        old="if target * _ACCEPT <= value <= target:",
        new="if target * _ACCEPT <= value <= 1.02 * target:",
        tests=(_CALIBRATION,),
    ),
    Mutant(
        name="delta doubled",
        file="privacy/accountants/__init__.py",
        old="        return accountant.epsilon(mechanisms, delta=delta, adjacency=adjacency)\n",
        new="        return accountant.epsilon(mechanisms, delta=2 * delta, adjacency=adjacency)\n",
        tests=("privacy/test_accountants.py", _CALIBRATION),
    ),
    Mutant(
        name="adjacency ignored (C where 2C is due)",
        file="privacy/accountants/__init__.py",
        old="        return accountant.epsilon(mechanisms, delta=delta, adjacency=adjacency)\n",
        new='        return accountant.epsilon(mechanisms, delta=delta, adjacency="add_remove")\n',
        tests=("privacy/test_accountants.py", _CALIBRATION),
    ),
    Mutant(
        name="the budget exceeded by a plan is let through",
        file="privacy/plan.py",
        old="        if self.epsilon.upper > self.budget.epsilon:",
        new="        if self.epsilon.lower > 2 * self.budget.epsilon:",
        tests=("privacy/test_plan.py",),
        fast=True,
    ),
    # What is released of a private hold-out.
    Mutant(
        name="a hold-out report without its ledger entry",
        file="training/holdout.py",
        old="        self._ledger.record(PHASE, report)\n",
        new="",
        tests=(_HOLDOUT,),
        fast=True,
    ),
    Mutant(
        name="the hold-out read before its ledger is durable",
        file="training/holdout.py",
        old="        self._ledger.commit()\n",
        new="",
        tests=(_HOLDOUT,),
    ),
    Mutant(
        name="the same noise in every hold-out report",
        file="training/holdout.py",
        old="                step=report,\n",
        new="                step=0,\n",
        tests=(_HOLDOUT,),
    ),
    Mutant(
        name="a hold-out released almost without noise",
        file="training/holdout.py",
        old="                phase=self._phase,\n",
        new="                phase=type(self._phase)(spec=self._phase.spec, noise_multiplier=1e-9),\n",
        tests=(_HOLDOUT,),
    ),
    Mutant(
        name="a hold-out of another size under the plan",
        file="training/holdout.py",
        old="if self._phase.spec != wanted or len(ledger.plan.phases) != 1:",
        new="if False:",
        tests=(_HOLDOUT,),
    ),
    Mutant(
        name="each trial of random stopping releases the whole budget of the hold-out",
        file="search/holdout.py",
        old="    return trial_budget(search.rule, search.holdout_budget)\n",
        new="    return search.holdout_budget\n",
        tests=(
            "search/test_secrecy.py::test_a_private_hold_out_chooses_through_noise_and_pays_for_the_released_result",
        ),
    ),
    # The ledger's chain.
    Mutant(
        name="a chain that forgets the line before",
        file="privacy/chain.py",
        old='previous.encode() + b"\\n" + _text(record)',
        new="_text(record)",
        tests=("privacy/test_chain.py", _LEDGER),
    ),
    # Tuning on a subsample, and what choosing costs.
    Mutant(
        name="trials see all examples instead of the subsample",
        file="privacy/noise.py",
        old="takes_part if members is None else takes_part & members",
        new="takes_part",
        tests=(_SUBSAMPLE,),
    ),
    Mutant(
        name="the final run sees the subsample again",
        file="data/types.py",
        old="found.__members, found.__size = ~members if rest else members, sizes[rest]",
        new="found.__members, found.__size = members, sizes[rest]",
        tests=(_SUBSAMPLE,),
    ),
    Mutant(
        name="the size of the subsample is told",
        file="data/types.py",
        old="~members if rest else members, sizes[rest]",
        new="~members if rest else members, int((~members if rest else members).sum())",
        tests=(_SUBSAMPLE,),
    ),
    Mutant(
        name="another subsample in each trial",
        file="privacy/noise.py",
        old='return key.generator("subsample").below(fraction, population)',
        new='return NoiseKey.generate().generator("subsample").below(fraction, population)',
        tests=(_SUBSAMPLE,),
    ),
    Mutant(
        name="the final run forgotten in what a subsample costs",
        file="privacy/selection_subsample.py",
        old="q * inside(at) + (1 - q) * outside(at) - delta",
        new="q * inside(at) - delta",
        tests=(_SUBSAMPLE_BOUND,),
        fast=True,
    ),
    Mutant(
        name="amplified as if epsilon were small",
        file="privacy/selection_subsample.py",
        old="math.log1p(q * math.expm1(inner))",
        new="math.log1p(q * inner)",
        tests=(_SUBSAMPLE_BOUND,),
    ),
    Mutant(
        name="what earlier searches spent before a subsample forgotten",
        file="privacy/selection_subsample.py",
        old="last = _profile((*before, *final), budget, budget.delta)",
        new="last = _profile(final, budget, budget.delta)",
        tests=("search/test_earlier.py",),
    ),
    # Going on from earlier searches.
    Mutant(
        name="what earlier searches spent is not carried",
        file="search/earlier.py",
        old="for each in searches if each.counted for",
        new="for each in searches if not each.counted for",
        tests=("search/test_earlier.py",),
        fast=True,
    ),
    Mutant(
        name="earlier trials that have not ended are not carried",
        file="search/earlier.py",
        old="            spent = plan.mechanisms\n",
        new="            spent = ()\n",
        tests=("search/test_earlier.py",),
    ),
    Mutant(
        name="an exchanged ledger of an earlier search is believed",
        file="search/earlier.py",
        old="ledger.mechanisms if ledger.head == heads.get(seed) else plan.mechanisms",
        new="ledger.mechanisms",
        tests=("search/test_earlier.py",),
    ),
    Mutant(
        name="an earlier search with another source of data is taken for other people's",
        file="search/carrying.py",
        old="private.shares_with(other)",
        new="False",
        tests=("search/test_earlier.py",),
    ),
    Mutant(
        name="the theorem's condition on the second point not checked",
        file="privacy/selection_budget.py",
        old="    if delta_hat > hat_allowance(runs, hat):",
        new="    if delta_hat > 1:",
        tests=("privacy/test_selection_budget.py",),
    ),
)

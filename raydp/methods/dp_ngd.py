"""DP-NGD (arXiv 2607.05866): whiten per-example gradients by a public curvature, clip, noise, and map back.

The Fisher matrix is estimated on public examples (or on structured noise) at the current weights, every few steps; a
floor λ_t on its eigenvalues follows a schedule. Both are functions of public data and of earlier private outputs, so a
step costs what a step of DP-SGD costs. The one-sided ``pre`` and ``post`` arms of the paper's ablation differ in the
geometry alone. Its ``private`` curvature arm releases the curvature once, at the initial weights, in a phase of its own
that takes a share of the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.geometry import Geometry
from raydp.geometry.blocks import blocks_of
from raydp.geometry.clamping import CLAMPINGS, ClampingSchedule, safe_floor
from raydp.geometry.curvature import Curvature
from raydp.geometry.kfac import FORMS, LABELS, estimate_curvature, example_gradients, pink_noise
from raydp.geometry.preconditioning import PostConditioning, PreConditioning
from raydp.geometry.private_factors import (
    FACTOR_CLIP_NORM,
    ClippedMoments,
    FactorEngine,
    curvature_of_moments,
    moment_radii,
    moment_sizes,
)
from raydp.geometry.whitening import FlooredGeometry, Whitening
from raydp.methods.base import Method, Policy, Setting, option, refuse_unused
from raydp.methods.pretraining import PretrainableHyperparameters, Pretraining
from raydp.methods.public import FisherExamples, public_generator, require_public
from raydp.privacy.mechanism import PhaseSpec

ARMS = ("whitened", "pre", "post")
SOURCES = ("public", "noise", "private")
_PRIVATE = (
    "curvature_share",
    "curvature_steps",
    "curvature_batch_size",
    "curvature_input_clip",
    "curvature_output_clip",
)
_NOISE = ("noise_examples", "noise_exponent")
_PROBE = 128  # public examples whose clipping is looked at in a report
_PROBE_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class DpNgdHyperparameters(PretrainableHyperparameters):
    """The shared hyperparameters, those of the pre-training, the curvature's and the floor's.

    Two defaults are ours, the paper naming none. The safe step is that of a DP-SGD with learning rate 1 and clip norm
    1, which trains most models; taking one's own learning rate with C = 10 puts the floor at 100, above almost every
    eigenvalue. And kappa is far above the hundredth that the paper's "low" suggests, because accuracy fell with it in
    everything that we measured (searches/README.md).
    """

    clip_norm: float = option(10.0, "C, one L2 norm over all coordinates of an example, in the arm's own geometry")
    reference_learning_rate: float | None = option(
        1.0, "learning rate of the DP-SGD whose step length is the safe one; none takes learning_rate"
    )
    reference_clip_norm: float = option(1.0, "clip norm of that DP-SGD")
    clamping: str = option("dynamic", "the floor on eigenvalues: dynamic, fixed (at lambda_safe) or none (diverges)")
    lambda_safe: float | None = option(None, "the floor at both ends of the schedule; none takes the step equivalence")
    kappa: float = option(0.3, "lambda_base / lambda_safe, in (0, 1]")
    lambda_base: float | None = option(None, "the low plateau of the dynamic floor; none takes kappa * lambda_safe")
    decay_fraction: float = option(0.1, "T1/T, the share of the steps in which the floor falls, in [0, 1]")
    exponent: float = option(10.0, "p >= 1, the exponent with which the floor rises again")
    curvature_interval: int = option(8, "steps between two estimates of the curvature")
    curvature_form: str = option("expand", "positions of a convolution: expand (independent) or reduce (averaged)")
    fisher_labels: str | None = option(
        None, "labels of the Fisher matrix: model (drawn from it), random or given; none takes model, private has given"
    )
    curvature_source: str = option(
        "public", "where the curvature comes from: public examples, structured noise, or private examples"
    )
    curvature_share: float = option(0.2, "share of epsilon that a private curvature takes, in (0, 1)")
    curvature_steps: int = option(1, "logical steps over which a private curvature is averaged, before the training")
    curvature_batch_size: int | None = option(None, "expected batch size of those steps; none takes batch_size")
    curvature_input_clip: float = option(1.0, "c_a, root mean square to which a layer's inputs are clipped in them")
    curvature_output_clip: float = option(1.0, "c_g, norm to which a layer's output gradients are clipped in them")
    noise_examples: int = option(500, "number of noise images, with curvature_source = noise")
    noise_exponent: float = option(1.0, "a >= 0 of their power spectrum 1/f^a: 0 white, 1 pink, 2 like natural images")
    arm: str = option("whitened", "whitened (DP-NGD), pre or post: the curvature on both sides of the noise or on one")

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("arm", self.arm, ARMS)
        _validate.one_of("clamping", self.clamping, CLAMPINGS)
        _validate.one_of("curvature_form", self.curvature_form, FORMS)
        _validate.one_of("fisher_labels", self.labels_kind, LABELS)
        _validate.one_of("curvature_source", self.curvature_source, SOURCES)
        _validate.integer("curvature_interval", self.curvature_interval, low=1)
        _validate.between("curvature_share", self.curvature_share, 0, 1, low_open=True, high_open=True)
        _validate.integer("curvature_steps", self.curvature_steps, low=1)
        if self.curvature_batch_size is not None:
            _validate.integer("curvature_batch_size", self.curvature_batch_size, low=1)
        _validate.positive("curvature_input_clip", self.curvature_input_clip)
        _validate.positive("curvature_output_clip", self.curvature_output_clip)
        _validate.integer("noise_examples", self.noise_examples, low=1)
        _validate.between("noise_exponent", self.noise_exponent, 0, 10)
        _validate.between("kappa", self.kappa, 0, 1, low_open=True)
        _validate.between("decay_fraction", self.decay_fraction, 0, 1)
        for name in ("reference_learning_rate", "reference_clip_norm", "lambda_safe", "lambda_base"):
            if getattr(self, name) is not None:
                _validate.positive(name, getattr(self, name))
        self._refuse_what_has_no_effect()
        self.clamping_schedule(1)  # its own rules

    def _refuse_what_has_no_effect(self) -> None:
        if self.lambda_base is not None and self.clamping != "dynamic":
            raise InvalidValue(
                "lambda_base",
                self.lambda_base,
                f"has no effect with clamping = {self.clamping!r}",
                "Leave it out, or set clamping = 'dynamic'.",
            )
        if self.lambda_safe is not None and self.clamping == "none":
            raise InvalidValue(
                "lambda_safe", self.lambda_safe, "has no effect with clamping = 'none'", "Leave it out, or clamp."
            )
        if self.curvature_source == "noise" and self.fisher_labels == "given":
            raise InvalidValue(
                "fisher_labels", "given", "needs labelled examples, but noise has none", "Choose model or random."
            )
        if self.curvature_source == "private":
            if self.labels_kind != "given":
                raise InvalidValue(
                    "fisher_labels",
                    self.fisher_labels,
                    "is not for a private curvature, which takes the examples' own labels",
                    "Leave it out, or write 'given'.",
                )
            refuse_unused(self, ("curvature_interval",), because="curvature_source = 'private', released once")
        else:
            refuse_unused(self, _PRIVATE, because=f"curvature_source = {self.curvature_source!r}")
        if self.curvature_source != "noise":
            refuse_unused(self, _NOISE, because=f"curvature_source = {self.curvature_source!r}")

    @property
    def labels_kind(self) -> str:
        """``fisher_labels``, or the source's default."""
        if self.fisher_labels is not None:
            return self.fisher_labels
        return "given" if self.curvature_source == "private" else "model"

    @property
    def step_equivalence(self) -> float:
        """(ηC/η_sC_s)²: the squared length of a step with F̃ = 1 against that of the reference DP-SGD."""
        reference = self.learning_rate if self.reference_learning_rate is None else self.reference_learning_rate
        return safe_floor(
            learning_rate=self.learning_rate,
            clip_norm=self.clip_norm,
            reference_learning_rate=reference,
            reference_clip_norm=self.reference_clip_norm,
        )

    @property
    def safe_floor(self) -> float:
        """λ_safe: where a step, with all eigenvalues at the floor, is as long as the reference DP-SGD's.

        A whitened step is at most ηC/√λ long, hence (ηC/η_sC_s)². A pre-conditioned step is at most ηC/λ
        long, hence ηC/η_sC_s. The floor does not bound a post-conditioned one, which takes the whitened arm's.
        """
        if self.lambda_safe is not None:
            return self.lambda_safe
        return self.step_equivalence**0.5 if self.arm == "pre" else self.step_equivalence

    def clamping_schedule(self, steps: int) -> ClampingSchedule:
        """λ_t over T = ``steps``."""
        return ClampingSchedule(
            kind=self.clamping,
            lambda_safe=self.safe_floor,
            lambda_base=self.kappa * self.safe_floor if self.lambda_base is None else self.lambda_base,
            steps=steps,
            decay_steps=round(self.decay_fraction * steps),
            exponent=self.exponent,
        )


class DpNgdPolicy(Policy):
    """Estimates the curvature every ``curvature_interval`` steps, and moves the floor at every step.

    A private curvature is the average of what the phase ``curvature`` released, and stays.

    Raises:
        InvalidValue: there are no examples for the curvature, or their labels are no classes of the model.
    """

    def __init__(self, hyperparameters: DpNgdHyperparameters, setting: Setting) -> None:
        self._hyperparameters = hyperparameters
        self._model, self._seed, self._workers = setting.model, setting.seed, setting.workers
        self._blocks = blocks_of(setting.model)
        self._clamping = hyperparameters.clamping_schedule(setting.plan.phase("train").steps)
        self._examples = self._fisher_examples(setting)
        self._pretraining = Pretraining(hyperparameters, setting)
        self._curvature: Curvature | None = None
        self._estimated_at = -1
        self._geometry: FlooredGeometry | None = None
        self._step = 0
        self._engine: FactorEngine | None = None
        if hyperparameters.curvature_source == "private":
            self._engine = FactorEngine(setting.model, form=hyperparameters.curvature_form)
            self._moments_geometry = ClippedMoments(
                sizes=moment_sizes(self._blocks),
                radii=moment_radii(
                    self._blocks,
                    input_clip=hyperparameters.curvature_input_clip,
                    output_clip=hyperparameters.curvature_output_clip,
                ),
            )
        self._moments: list[Tensor] = []  # sums of what the phase ``curvature`` released, as long as it runs

    def _fisher_examples(self, setting: Setting) -> FisherExamples | None:
        """What the curvature is estimated on; None if it is private."""
        chosen = self._hyperparameters
        if chosen.curvature_source == "private":
            return None
        if chosen.curvature_source == "noise":
            if setting.input_shape is None:
                raise InvalidValue("input_shape", None, "must be known to draw noise images", "Give the setting one.")
            images = pink_noise(
                (chosen.noise_examples, *setting.input_shape),
                exponent=chosen.noise_exponent,
                generator=self._generator(-1),
            )
            images = images.to(next(setting.model.parameters()).device)
            return FisherExamples(images=images, fisher_labels=chosen.labels_kind, labels=None)
        public = require_public(
            setting,
            purpose="from which dp_ngd estimates its curvature",
            alternative=", or curvature_source = 'noise' to do without",
        )
        return FisherExamples.of(setting, public, chosen.labels_kind)

    def _generator(self, step: int) -> torch.Generator:
        """Public randomness of one step: the same whenever the step is run."""
        return public_generator(self._seed, step + 1)

    def prepare(self) -> None:
        self._pretraining.run()

    def engine(self, phase: str) -> FactorEngine | None:
        return self._engine if phase == "curvature" else None

    def interval(self, phase: str) -> int | None:
        return None if self._engine is not None else self._hyperparameters.curvature_interval

    def trains(self, phase: str) -> bool:
        return phase != "curvature"

    def observe(self, phase: str, step: int, released: Sequence[Tensor]) -> None:
        if phase == "curvature":
            found = self._moments_geometry.lift(released)
            self._moments = [a + b for a, b in zip(self._moments, found, strict=True)] if self._moments else found

    def geometry(self, phase: str, step: int) -> Geometry:
        if phase == "curvature":
            return self._moments_geometry
        self._refresh(step)
        assert self._curvature is not None  # step 0 estimates, and a checkpoint holds the estimate
        floor = self._clamping.floor(step)
        if self._geometry is None:
            arms: dict[str, type[FlooredGeometry]] = {
                "whitened": Whitening,
                "pre": PreConditioning,
                "post": PostConditioning,
            }
            self._geometry = arms[self._hyperparameters.arm](curvature=self._curvature, floor=floor)
        elif self._geometry.floor != floor:
            self._geometry = self._geometry.with_floor(floor)
        self._step = step
        return self._geometry

    def _refresh(self, step: int) -> None:
        if self._engine is not None:
            if self._curvature is None:
                steps = self._hyperparameters.curvature_steps
                self._curvature = curvature_of_moments(
                    self._blocks, [total / steps for total in self._moments], self._workers
                )
                self._moments = []
            return
        # A resumed run asks again for the geometry of its last step, whose curvature belongs to earlier weights.
        if step % self._hyperparameters.curvature_interval == 0 and step != self._estimated_at:
            self._curvature = self._estimate(step)
            self._estimated_at, self._geometry = step, None

    def _estimate(self, step: int) -> Curvature:
        assert self._examples is not None
        return estimate_curvature(
            self._model,
            self._examples.images,
            generator=self._generator(step),
            fisher_labels=self._examples.fisher_labels,
            labels=self._examples.labels,
            form=self._hyperparameters.curvature_form,
            workers=self._workers,
        )

    def diagnostics(self) -> dict[str, float]:
        """Functions of public examples and released weights.

        ``lambda_t``; ``clamped_fraction`` of the eigenvalues; ``d_eff`` = Σ λ/λ̃; ``step_ratio``, the expected squared
        length of the step's noise against that of the reference DP-SGD's (for DP-NGD (ηC/η_sC_s)²·mean(1/λ̃));
        ``public_clip_fraction`` of the examples that the curvature comes from, where these are not private: the
        fraction of private ones is not ours to see.
        """
        if self._geometry is None or self._curvature is None:
            return {}
        floor = self._geometry.floor
        power = {"whitened": 1, "pre": 2, "post": 0}[self._hyperparameters.arm]
        numbers = {
            "lambda_t": floor,
            "clamped_fraction": self._curvature.clamped_fraction(floor),
            "d_eff": self._curvature.effective_dimension(floor),
            "step_ratio": self._hyperparameters.step_equivalence * self._curvature.mean_inverse(floor, power),
        }
        if self._examples is not None:
            numbers["public_clip_fraction"] = self._public_clip_fraction(self._examples, self._geometry)
        return numbers

    def _public_clip_fraction(self, examples: FisherExamples, geometry: FlooredGeometry) -> float:
        """Share of the first public examples whose coordinates are longer than C."""
        generator, clipped = self._generator(self._step), 0
        images = examples.images[:_PROBE]
        for start in range(0, len(images), _PROBE_BATCH):
            piece = slice(start, start + _PROBE_BATCH)
            gradients = example_gradients(
                self._model,
                images[piece],
                generator=generator,
                fisher_labels=examples.fisher_labels,
                labels=None if examples.labels is None else examples.labels[:_PROBE][piece],
            )
            clipped += int((geometry.lengths(gradients) > self._hyperparameters.clip_norm).sum())
        return clipped / len(images)

    def state_dict(self) -> dict[str, Any]:
        return {
            "curvature": None if self._curvature is None else self._curvature.state(),
            "estimated_at": self._estimated_at,
            "moments": self._moments,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["curvature"] is not None:
            self._curvature = Curvature.from_state(self._blocks, state["curvature"])
        self._estimated_at, self._geometry = int(state["estimated_at"]), None
        self._moments = list(state["moments"])


class DpNgd(Method):
    """One phase, ``train``, with DP-SGD's noise multiplier, in the whitened geometry.

    With private curvature a phase ``curvature`` comes before it, which takes its share of the budget and moves no
    weight.
    """

    name = "dp_ngd"
    summary = "natural gradient: per-example gradients are clipped and noised in the whitened space of a Fisher matrix"
    hyperparameters = DpNgdHyperparameters
    tasks = ("classification",)  # labels are drawn from logits

    def phases(self, hyperparameters: DpNgdHyperparameters, *, population: int) -> tuple[PhaseSpec, ...]:
        (train,) = super().phases(hyperparameters, population=population)
        if hyperparameters.curvature_source != "private":
            return (train,)
        batch_size = hyperparameters.curvature_batch_size
        curvature = PhaseSpec(
            name="curvature",
            steps=hyperparameters.curvature_steps,
            batch_size=hyperparameters.batch_size if batch_size is None else batch_size,
            population=population,
            clip_norm=FACTOR_CLIP_NORM,
            share=hyperparameters.curvature_share,
        )
        return curvature, train

    def uses_public(self, hyperparameters: DpNgdHyperparameters) -> bool:
        return hyperparameters.curvature_source == "public" or hyperparameters.pretrains

    def policy(self, hyperparameters: DpNgdHyperparameters, setting: Setting) -> DpNgdPolicy:
        return DpNgdPolicy(hyperparameters, setting)

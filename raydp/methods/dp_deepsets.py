"""DP-DeepSets (arXiv 2606.26772): a public hypernetwork turns one noisy embedding of the private set into a model.

No gradient of a private example is ever taken. Each private example is embedded by the frozen encoder φ1, embeddings
are clipped to norm C and summed, and one Gaussian draw is added: a phase of one step on all data. What follows, the
decoder φ2, is post-processing. The hypernetwork was trained before on public data sets of the same size, with noise of
the release's size, at no cost of privacy.

The noise is that of the analytic Gaussian mechanism, for the budget's own adjacency: with ``replace_one`` the sum moves
by 2C (the paper's 2C/N of the average), with ``add_remove`` by C, and the divisor N is a public number. The paper's
formula, s² = 8 C² log(1.25/δ)/(ε² N²), is there for comparison: such a run spends the ε that its plan certifies, and is
infeasible where that would exceed the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from raydp import _validate
from raydp._workers import ALONE, Workers
from raydp.errors import InvalidValue
from raydp.geometry import Identity
from raydp.methods.base import Hyperparameters, Method, Policy, PublicExamples, Setting, option, refuse_unused
from raydp.methods.hypernetwork_training import (
    HypernetworkCache,
    PublicSets,
    SetLosses,
    TrainingOptions,
    digest_of,
    train,
    validate,
)
from raydp.methods.public import require_public
from raydp.models.encoders import Encoder as ImageEncoder
from raydp.models.encoders import load_encoder
from raydp.models.hypernetwork import DECODERS, ENCODERS, Architecture, Hypernetwork, Layout
from raydp.privacy.mechanism import Phase, PhaseSpec

_CALIBRATIONS = {"analytic": "exact", "paper": "classical"}
_LEARNING = ("learning_rate", "epochs", "sets_per_step", "loss_points", "validation_fraction", "hypernetwork_seed")
_TRANSFORMER = ("decoder_width", "decoder_heads")


@dataclass(frozen=True, kw_only=True)
class DeepSetsHyperparameters(Hyperparameters):
    """The hypernetwork's sizes and its public training. Only the clip norm and the embedding's width meet the noise."""

    clip_norm: float = option(1.0, "C, the L2 norm to which the embedding of an example is clipped")
    embedding: int = option(128, "D, the width of the set's embedding, to which the noise is added")
    encoder: str = option("mlp", "φ1: mlp, linear, or oracle (y times the first D inputs, for linear regression)")
    image_encoder: str | None = option(
        None, "frozen encoder that stands before φ1: efficientnet_lite0, or a path of weights; none sees the pixels"
    )
    encoder_width: int = option(512, "hidden units of an mlp encoder")
    decoder: str = option("transformer", "φ2: transformer, mlp, or pad (the embedding is the first D parameters)")
    decoder_width: int = option(128, "width of a transformer's tokens")
    decoder_depth: int = option(4, "blocks of a transformer, or hidden layers of an mlp")
    decoder_hidden: int = option(512, "hidden units of a transformer's mlps, or of an mlp decoder")
    decoder_heads: int = option(4, "heads of a transformer's self-attention")
    generates: str = option("*", "names of the parameters to generate, as patterns with commas between")
    learning_rate: float = option(1e-3, "peak learning rate of AdamW on the public sets, warm-up and cosine")
    epochs: int = option(20, "passes over the public sets")
    sets_per_step: int = option(4, "public sets in a training step")
    loss_points: int = option(64, "random examples of a set that enter its loss; all enter its embedding")
    validation_fraction: float = option(0.1, "share of the public sets that is kept for the public validation loss")
    hypernetwork_seed: int = option(0, "seed of the hypernetwork's weights and training; runs of any seed share it")
    calibration: str = option(
        "analytic", "the noise: analytic (least for the budget) or paper (the classical formula, for comparison)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("encoder", self.encoder, ENCODERS)
        _validate.one_of("decoder", self.decoder, DECODERS)
        _validate.one_of("calibration", self.calibration, _CALIBRATIONS)
        _validate.positive("learning_rate", self.learning_rate)
        for name in ("epochs", "sets_per_step", "loss_points"):
            _validate.integer(name, getattr(self, name), low=1)
        _validate.between("validation_fraction", self.validation_fraction, 0, 1, high_open=True)
        _validate.integer("hypernetwork_seed", self.hypernetwork_seed, low=0)
        self.architecture  # noqa: B018 - its own rules
        if not self.learns:
            refuse_unused(self, _LEARNING, because="encoder = 'oracle' and decoder = 'pad', which learn nothing")
        if self.encoder != "mlp":
            refuse_unused(self, ("encoder_width",), because=f"encoder = {self.encoder!r}")
        if self.decoder != "transformer":
            refuse_unused(self, _TRANSFORMER, because=f"decoder = {self.decoder!r}")
        if self.decoder == "pad":
            refuse_unused(self, ("decoder_depth", "decoder_hidden"), because="decoder = 'pad'")

    @property
    def learns(self) -> bool:
        """Whether the hypernetwork has weights to train."""
        return self.encoder != "oracle" or self.decoder != "pad"

    @property
    def architecture(self) -> Architecture:
        names = {item.name for item in dataclasses.fields(Architecture)}
        return Architecture(**{name: getattr(self, name) for name in names})

    @property
    def patterns(self) -> tuple[str, ...]:
        """``generates``, one by one."""
        return tuple(part.strip() for part in self.generates.split(","))


@dataclass(frozen=True, kw_only=True)
class Features:
    """What φ1 sees of an example, a function of that example alone (and of public constants).

    Attributes:
        num_classes: of the targets; None where they are numbers.
        images: None, or the frozen encoder whose vector stands for an image; the target is then left out.
        centre, spread: of the encoder's vectors over public images, (1, width); they put its numbers on one scale.
    """

    num_classes: int | None
    images: ImageEncoder | None = None
    centre: Tensor | None = None
    spread: Tensor | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """(n, f): the input as one row with its target (one-hot, or the number), or the encoder's vector."""
        if self.images is not None:
            vectors = self.images(inputs)
            return vectors if self.centre is None or self.spread is None else (vectors - self.centre) / self.spread
        if self.num_classes is None:
            return torch.cat([inputs.flatten(1), targets[:, None].float()], dim=1)
        return torch.cat([inputs.flatten(1), F.one_hot(targets, self.num_classes).float()], dim=1)

    def of_public(self, public: PublicExamples, workers: Workers = ALONE) -> tuple[Tensor, Features]:
        """Features of public examples, and these features with the constants that scale them.

        An encoder's vectors are computed once: they are kept with the trained hypernetworks. The workers of a run take
        those of the first.

        Raises:
            InvalidValue: an encoder, and pixels that are not normalised to [-1, 1].
        """
        if self.images is None:
            return self(public.inputs, public.targets), self
        if public.inputs.dim() != 4 or float(public.inputs.abs().max()) > 1 + 1e-3:
            raise InvalidValue(
                "image_encoder",
                self.images.name,
                "needs images whose pixels are normalised to [-1, 1]",
                "Use a family of neighbour sets, whose pixels are.",
            )
        vectors = workers.share(self._vectors(public.inputs) if workers.rank == 0 else None)
        assert vectors is not None
        if not bool(torch.isfinite(vectors).all()):
            raise InvalidValue("image_encoder", self.images.name, "gave numbers that are not finite", "Check it.")
        centre, spread = vectors.mean(dim=0, keepdim=True), vectors.std(dim=0, keepdim=True) + 1e-6
        return (vectors - centre) / spread, dataclasses.replace(self, centre=centre, spread=spread)

    def _vectors(self, inputs: Tensor) -> Tensor:
        """The encoder's vectors of public images, kept or made."""
        assert self.images is not None
        cache = HypernetworkCache()
        record: dict[str, object] = {"encoder": self.images.name, "weights": self.images.digest}
        digest = digest_of(record, {"inputs": inputs})
        kept = cache.get(digest)
        if kept is not None:
            return kept["vectors"]
        vectors = self.images(inputs)
        cache.put(digest, {"vectors": vectors})
        return vectors


class _Embeddings:
    """φ1 of private examples: the engine of the phase ``embed``."""

    preferred_batch = 4096

    def __init__(self, hypernetwork: Hypernetwork, features: Features) -> None:
        self._hypernetwork, self._features = hypernetwork, features

    def __call__(self, inputs: Tensor, targets: Tensor, /) -> list[Tensor]:
        with torch.no_grad():
            return [self._hypernetwork.embed(self._features(inputs, targets))]


class DeepSetsPolicy(Policy):
    """Trains the hypernetwork on public sets, lets the private set be embedded, and writes the generated parameters.

    Raises:
        InvalidValue: there are no public *sets*; they are of another size than the private one; the model's parameters
            cannot be generated; or the encoder does not fit the task.
        UnknownName: there is no parameter of that name.
    """

    def __init__(self, hyperparameters: DeepSetsHyperparameters, setting: Setting) -> None:
        self._hyperparameters, self._setting = hyperparameters, setting
        phase = setting.plan.phase("embed")
        self._noise_std = phase.noise_std / phase.batch_size  # of the average
        self._num_classes = setting.num_classes
        if hyperparameters.encoder == "oracle" and setting.task.name != "regression":
            raise InvalidValue("encoder", "oracle", "is for linear regression", "Choose 'mlp' or 'linear'.")
        layout = Layout.of(setting.model, hyperparameters.patterns)
        self._losses = SetLosses(setting.model, setting.task, layout.names)
        name = hyperparameters.image_encoder
        self._features = Features(num_classes=self._num_classes, images=None if name is None else load_encoder(name))
        self._public = self._public_sets(phase) if hyperparameters.learns else None
        self._hypernetwork = Hypernetwork(
            features=self._width(),
            layout=layout,
            architecture=hyperparameters.architecture,
            clip_norm=hyperparameters.clip_norm,
            seed=hyperparameters.hypernetwork_seed,
        ).to(next(setting.model.parameters()).device)
        self._identity = Identity(sizes=(hyperparameters.embedding,))
        self._engine = _Embeddings(self._hypernetwork, self._features)
        self._public_loss: float | None = None

    def _width(self) -> int:
        shape = self._setting.input_shape
        if shape is None:
            raise InvalidValue("input_shape", None, "must be known to embed examples", "Give the setting one.")
        probe = torch.zeros(1, *shape), torch.zeros(1, dtype=torch.float32 if self._num_classes is None else torch.long)
        return self._features(*probe).shape[1]

    def _public_sets(self, phase: Phase) -> PublicSets:
        public = require_public(self._setting, purpose="from whose data sets dp_deepsets learns its hypernetwork")
        if public.sets is None:
            raise InvalidValue(
                "public", "examples", "must be data sets for dp_deepsets", "Take a family such as 'regression'."
            )
        size, population = public.sets.shape[1], phase.spec.population
        if size != population:
            trained = phase.noise_std / size
            raise InvalidValue(
                "public sets",
                size,
                f"must hold as many examples as the private set, N = {population}: a release of {population} has noise "
                f"of standard deviation {self._noise_std:.6g} on the average of the embeddings, one of {size} has "
                f"{trained:.6g}, and the hypernetwork must be trained with the noise of the release",
                f"Make public sets of {population} examples, or release from {size}.",
            )
        if public.num_classes != self._num_classes:
            raise InvalidValue(
                "public",
                public.num_classes,
                f"must have the {self._num_classes} classes of the private set",
                "Choose public sets of the same targets.",
            )
        features, self._features = self._features.of_public(public, self._setting.workers)
        return PublicSets(
            features=features,
            inputs=public.inputs,
            targets=public.targets,
            sets=public.sets,
        )

    def prepare(self) -> None:
        if self._public is None:
            return
        chosen = self._hyperparameters
        count = len(self._public.sets)
        kept = int(chosen.validation_fraction * count)
        learning, validation = self._public.of(slice(0, count - kept)), self._public.of(slice(count - kept, count))
        workers, cache, digest = self._setting.workers, HypernetworkCache(), self._digest()
        weights = workers.share(cache.get(digest) if workers.rank == 0 else None)
        if weights is None:
            options = TrainingOptions(
                steps=chosen.epochs * -(-len(learning.sets) // chosen.sets_per_step),
                learning_rate=chosen.learning_rate,
                sets=chosen.sets_per_step,
                loss_points=chosen.loss_points,
                seed=chosen.hypernetwork_seed,
            )
            train(
                self._hypernetwork,
                losses=self._losses,
                public=learning,
                noise_std=self._noise_std,
                options=options,
                workers=workers,
            )
            if workers.rank == 0:
                cache.put(digest, {name: value.cpu() for name, value in self._hypernetwork.state_dict().items()})
        else:
            self._hypernetwork.load_state_dict(weights)
        if kept:
            self._public_loss = validate(
                self._hypernetwork,
                losses=self._losses,
                public=validation,
                noise_std=self._noise_std,
                seed=chosen.hypernetwork_seed,
            )

    def _digest(self) -> str:
        """Of everything that the trained hypernetwork follows from."""
        assert self._setting.public is not None
        chosen = dataclasses.asdict(self._hyperparameters)
        record: dict[str, object] = {
            **{name: value for name, value in chosen.items() if name != "calibration"},
            "noise_std": self._noise_std,
            "task": self._setting.task.name,
            "public": self._setting.public.digest(),
            "target": str(self._setting.model),
            "device": str(next(self._hypernetwork.parameters()).device),
        }
        if self._setting.workers.count > 1:  # sums of gradients are rounded otherwise
            record["workers"] = self._setting.workers.count
        names = self._hypernetwork.layout.names
        rest = {name: value for name, value in self._setting.model.state_dict().items() if name not in names}
        return digest_of(record, rest)

    def geometry(self, phase: str, step: int) -> Identity:
        return self._identity

    def engine(self, phase: str) -> _Embeddings:
        return self._engine

    def trains(self, phase: str) -> bool:
        return False  # no step along a gradient: what is released is decoded

    def observe(self, phase: str, step: int, released: Sequence[Tensor]) -> None:
        """Decode the noisy average and write the parameters into the model."""
        with torch.no_grad():
            generated = self._hypernetwork.generate(released[0][None])
            own = dict(self._setting.model.named_parameters())
            for name, value in generated.items():
                own[name].copy_(value[0].view_as(own[name]))

    def diagnostics(self) -> dict[str, float]:
        """Functions of public data: ``noise_std`` on each coordinate of the average, the expected length of the noise,
        and the mean loss over public sets that were kept from training."""
        numbers = {
            "embedding_noise_std": self._noise_std,
            "embedding_noise_norm": self._noise_std * self._hyperparameters.embedding**0.5,
        }
        if self._public_loss is not None:
            numbers["public_validation_loss"] = self._public_loss
        return numbers

    def state_dict(self) -> dict[str, Any]:
        return {"hypernetwork": self._hypernetwork.state_dict(), "public_loss": self._public_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._hypernetwork.load_state_dict(state["hypernetwork"])
        self._public_loss = state["public_loss"]


class DpDeepSets(Method):
    """One phase, ``embed``: one step on all data, which moves no weight along a gradient."""

    name = "dp_deepsets"
    summary = "a hypernetwork trained on public data sets turns one noisy embedding of the private set into a model"
    hyperparameters = DeepSetsHyperparameters

    def phases(self, hyperparameters: DeepSetsHyperparameters, *, population: int) -> tuple[PhaseSpec, ...]:
        """Raises InvalidValue: there are fewer than 2 private examples."""
        _validate.integer("number of private examples", population, low=2)
        return (
            PhaseSpec(
                name="embed",
                steps=1,
                batch_size=population,
                population=population,
                clip_norm=hyperparameters.clip_norm,
                calibration=_CALIBRATIONS[hyperparameters.calibration],
            ),
        )

    def uses_public(self, hyperparameters: DeepSetsHyperparameters) -> bool:
        return hyperparameters.learns

    def policy(self, hyperparameters: DeepSetsHyperparameters, setting: Setting) -> DeepSetsPolicy:
        return DeepSetsPolicy(hyperparameters, setting)

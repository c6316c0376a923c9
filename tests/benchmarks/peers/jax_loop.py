"""Serve one step of DP-SGD by jax-privacy; started by ``bench_peers`` with an interpreter that has ``jax-privacy``.

``jax_privacy.clipped_grad`` and ``gaussian_privatizer`` in one compiled function. The models are those of
:mod:`tests.benchmarks.peers.workloads`, in plain functions. A convolution is a product with patches, which compiles to
a step that is several times faster on a CPU than with ``jax.lax.conv_general_dilated`` under the ``vmap`` of
``clipped_grad``, and pooling a maximum over a reshaped image. Compilation is not counted.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from importlib.metadata import version
from typing import Any

from tests.benchmarks.peers.serve import bind, serve

CLASSES, TOKENS, VOCABULARY, WIDTH, HEADS, BLOCKS = 10, 128, 1000, 128, 4, 6


def main(workload: str, batch: str, micro_batch: str, threads: str) -> None:
    bind(int(threads))
    if int(threads) == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    found = step(workload, int(batch), int(micro_batch))
    serve(found, jax=", ".join(f"{name} {version(name)}" for name in ("jax", "jax-privacy")))


def step(workload: str, batch: int, micro_batch: int) -> Any:
    """The compiled step, as a function without arguments."""
    import jax
    import jax.numpy as jnp
    import jax_privacy
    import numpy as np
    from jax_privacy import noise_addition

    generator = np.random.default_rng(0)

    def linear(inputs: int, outputs: int) -> tuple[Any, Any]:
        weight = generator.standard_normal((inputs, outputs)) * inputs**-0.5
        return jnp.asarray(weight, jnp.float32), jnp.zeros(outputs)

    def through(layer: tuple[Any, Any], x: Any) -> Any:
        return x @ layer[0] + layer[1]

    def dense(layers: list[tuple[Any, Any]], x: Any) -> Any:
        x = x.reshape(len(x), -1)
        for layer in layers[:-1]:
            x = jnp.tanh(through(layer, x))
        return through(layers[-1], x)

    def patches(x: Any) -> Any:
        """Of 3x3 pixels, (n, h, w, c) to (n, h, w, 9·c)."""
        height, width = x.shape[1:3]
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifts = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        return jnp.concatenate(shifts, axis=-1)

    def convolutional(layers: list[tuple[Any, Any]], x: Any) -> Any:
        for index, layer in enumerate(layers[:-2]):
            x = jnp.tanh(through(layer, patches(x)))
            if index % 2:
                n, height, width, channels = x.shape
                x = x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
        return dense(layers[-2:], x)

    def normalised(scale: tuple[Any, Any], x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale[0] + scale[1]

    def block(layer: dict[str, Any], x: Any) -> Any:
        inside = normalised(layer["before_attention"], x)
        query, key, value = (
            through(layer[name], inside).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value")
        )
        x = x + through(layer["out"], jax.nn.dot_product_attention(query, key, value).reshape(x.shape))
        inside = normalised(layer["before_mlp"], x)
        return x + through(layer["down"], jax.nn.gelu(through(layer["up"], inside), approximate=False))

    def encoder(layers: dict[str, Any], tokens: Any) -> Any:
        x = layers["words"][tokens] + layers["positions"]
        for layer in layers["blocks"]:
            x = block(layer, x)
        return through(layers["head"], normalised(layers["norm"], x).mean(1))

    def norm() -> tuple[Any, Any]:
        return jnp.ones(WIDTH), jnp.zeros(WIDTH)

    def new_block() -> dict[str, Any]:
        square = {name: linear(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
        around = {"before_attention": norm(), "before_mlp": norm()}
        return {**square, **around, "up": linear(WIDTH, 4 * WIDTH), "down": linear(4 * WIDTH, WIDTH)}

    images = generator.standard_normal((batch, 32, 32, 3)).astype(np.float32)
    if workload == "transformer":
        network: Any = encoder
        inputs: Any = generator.integers(0, VOCABULARY, (batch, TOKENS))
        parameters: Any = {
            "words": jnp.asarray(generator.standard_normal((VOCABULARY, WIDTH)), jnp.float32),
            "positions": jnp.asarray(generator.standard_normal((TOKENS, WIDTH)), jnp.float32),
            "blocks": [new_block() for _ in range(BLOCKS)],
            "norm": norm(),
            "head": linear(WIDTH, CLASSES),
        }
    elif workload == "cnn":
        network, inputs = convolutional, images
        channels = [3, 32, 32, 64, 64, 128, 128]
        parameters = [linear(9 * a, b) for a, b in itertools.pairwise(channels)]
        parameters += [linear(128 * 16, 128), linear(128, CLASSES)]
    else:
        network, inputs = dense, images
        sizes = {"mlp": [3072, 512, 512, CLASSES], "tiny": [3072, 8, CLASSES]}[workload]
        parameters = [linear(a, b) for a, b in itertools.pairwise(sizes)]
    data, labels = jnp.asarray(inputs), jnp.asarray(generator.integers(0, CLASSES, batch))

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(network(weights, x)), y[:, None], 1).sum()

    clipped = jax_privacy.clipped_grad(
        loss,
        l2_clip_norm=1.0,
        batch_argnums=(1, 2),
        normalize_by=float(batch),
        microbatch_size=micro_batch if micro_batch < batch else None,
    )
    privatizer = noise_addition.gaussian_privatizer(stddev=1.0 / batch, prng_key=0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        released, state = privatizer.update(clipped(weights, x, y), state, weights)
        return jax.tree.map(lambda weight, change: weight - 1e-6 * change, weights, released), state

    state = privatizer.init(parameters)
    compiled = update.lower(parameters, state, data, labels).compile()

    def advance() -> None:
        nonlocal parameters, state
        parameters, state = jax.block_until_ready(compiled(parameters, state, data, labels))

    return advance


if __name__ == "__main__":
    main(*sys.argv[1:])

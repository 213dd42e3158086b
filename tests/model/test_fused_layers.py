"""A model with fused layers computes what it computes without. The kernels run interpreted on a
CPU, and are compiled for a GPU that need not exist."""

from __future__ import annotations

import re
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention.interface import NAME, LayerShape, Span, register
from engine.attention.sdpa import SdpaBackend
from engine.config import AttentionName, QuantizationName
from engine.errors import ConfigError, ModelError
from engine.model import loader
from engine.model.attention_choice import choose_attention
from engine.model.batch import Batch
from engine.model.early_exit import _shortened
from engine.model.kv_cache import KVCache, Plane
from engine.model.loaded import ModuleCall
from engine.model.loader import load_model
from engine.model.memory import weights_of
from engine.model.proof import is_proven, probe_layers, reference
from engine.scheduling.segment import LAST, Segment
from tests.support import tiny
from tests.support.whole_sequence import whole_sequence

triton = pytest.importorskip("triton", "3.7", reason="needs triton 3.7 or later")

from engine.attention.triton import TritonBackend  # noqa: E402
from engine.attention.triton_kernels import Splitting  # noqa: E402
from engine.model import fused_layers as fused_layers_module  # noqa: E402
from engine.model import triton_layers as kernels  # noqa: E402
from engine.model import triton_products as products  # noqa: E402
from engine.model.fused_layers import EVERY, fused_layers, make_batch_invariant  # noqa: E402
from engine.model.triton_products import Product  # noqa: E402

CPU = torch.device("cpu")
SHAPE = tiny.SHAPE | {
    "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 2},
    "mixtral": {"num_local_experts": 4},
    "phi3": {"partial_rotary_factor": 0.75},
    "olmo2": {},
    "granite": {
        "residual_multiplier": 0.3, "attention_multiplier": 0.2, "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "gemma": {},
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 12},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 12},
}  # fmt: skip

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Yield a function that runs a function of this file with interpreted kernels, which must be
    chosen before the kernels are imported."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def model_of(family: str) -> Any:
    register()
    config = AutoConfig.for_model(family.split()[0], **(SHAPE | FAMILIES[family]))
    model = tiny.build(AutoModelForCausalLM.from_config, config)
    model.set_attn_implementation(NAME)
    return model


def compare(family: str) -> None:
    model = model_of(family)
    shapes, expected = probe_layers(model, family), reference(model, family)
    call = ModuleCall(fused_layers(model, shapes))

    def forward(segments: Sequence[Segment], plane: Plane) -> Tensor:
        batch = Batch.pack(segments, CPU)
        prepared = SdpaBackend(CPU).prepare(plane, batch.spans)
        with patch.object(model.base_model.layers[0], "forward", None):  # must not be called
            return call(batch.input_ids, batch.position_ids, batch.keep, prepared)

    assert is_proven(forward, shapes, expected, model)


def compare_first(family: str) -> None:
    model = model_of(family)
    shapes = probe_layers(model, family)
    fused = fused_layers(model, shapes)
    call, short = (_shortened(each, 1) for each in (fused, model))
    expected, call = reference(short, family), ModuleCall(call)

    def forward(segments: Sequence[Segment], plane: Plane) -> Tensor:
        batch = Batch.pack(segments, CPU)
        return call(
            batch.input_ids,
            batch.position_ids,
            batch.keep,
            SdpaBackend(CPU).prepare(plane, batch.spans),
        )

    assert is_proven(forward, shapes[:1], expected, short)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_first_layers_alone_end_in_the_last_norm(family: str, interpreted: Run) -> None:
    """Law: a draft of the target's first layers ends in the model's final norm, which the last
    layer's last kernel computes."""
    interpreted(compare_first, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_the_model(family: str, interpreted: Run) -> None:
    """Law: for a prompt in two chunks beside another sequence, through the paged cache, logits
    equal the model's own up to the last bits."""
    interpreted(compare, family)


def check_hidden() -> None:
    model, tokens, seen = model_of("qwen3"), torch.arange(5)[None], list[dict[int, Tensor]]()
    shapes = probe_layers(model, "it")
    for call in (ModuleCall(model), ModuleCall(fused_layers(model, shapes))):
        plane, found = KVCache(2, 4, CPU).add_plane("it", shapes, model.dtype), dict[int, Tensor]()
        prepared = SdpaBackend(CPU).prepare(plane, [Span(0, 5, 0, [0, 1])])
        with torch.inference_mode():
            call(tokens, tokens, 1, prepared, found.__setitem__)
        seen.append(found)
    assert list(seen[0]) == list(seen[1]) == [0, 1, LAST]
    for layer, rows in seen[0].items():
        torch.testing.assert_close(seen[1][layer], rows, atol=1e-4, rtol=1e-4)


def test_hidden_states_are_the_models(interpreted: Run) -> None:
    """Law: hidden states after each fused layer, and after the final norm, are those of the
    model."""
    interpreted(check_hidden)


def check_weights() -> None:
    model = model_of("qwen2")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    assert fused_layers(model, probe_layers(model, "it")) is not None
    layer = model.base_model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    for joined in (
        [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)],
        [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)],
        [mlp.gate_proj.weight, mlp.up_proj.weight],
    ):
        assert len({part.untyped_storage().data_ptr() for part in joined}) == 1
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert after.keys() == before.keys()


def test_weights_are_not_held_twice(interpreted: Run) -> None:
    """Law: the model's own parameters, biases too, become views of the joined weights."""
    interpreted(check_weights)


def check_loader(folder: str) -> None:
    def wrong(rows: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        return kernels.added(rows, **(how | {"factor": 1.5}))

    def broken(rows: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("there is no compiler")

    for sums, served in ((kernels.added, True), (wrong, False), (broken, False)):
        added = Mock(wraps=sums)
        with (
            patch.object(loader, "has_kernels", lambda device: True),
            patch.object(loader, "read_llama", lambda *_: None),
            patch.object(fused_layers_module, "added", added),
        ):
            loaded = load_model(folder, role="target", device="cpu", dtype="float32")
            assert added.called
            added.reset_mock()
            ids = torch.tensor([[3, 4]])
            loaded.logits(ids, torch.tensor([[0, 1]]), 2, whole_sequence(loaded, 2)())
            assert added.called == served


def test_the_loader_serves_what_is_proven(tmp_path: Path, interpreted: Run) -> None:
    """Law: our kernels run wherever they can, unless they fail or give other logits."""
    interpreted(check_loader, tiny.save(model_of("llama"), tmp_path))


def check_fallback(folder: str) -> None:
    with (
        patch.object(loader, "has_kernels", lambda device: True),
        patch.object(loader, "read_llama", lambda *_: None),
        patch.object(products, "multiply_rows", None),  # calling it fails
    ):
        loaded = load_model(folder, role="target", device="cpu", dtype="float16")
        ids = torch.tensor([[3, 4]])
        loaded.logits(ids, torch.tensor([[0, 1]]), 2, whole_sequence(loaded, 2)())


def test_without_fused_layers_no_kernel_runs(tmp_path: Path, interpreted: Run) -> None:
    """Bug: fused layers replace the products of modules that the model also has. It kept them when
    the fused layers had failed, and then failed itself."""
    interpreted(check_fallback, tiny.save(model_of("llama"), tmp_path))


def check_products(count: int, shape: tuple[int, int], kind: QuantizationName) -> None:
    linear = torch.nn.Linear(shape[0], shape[1], bias=shape[0] % 2 == 0)
    rows = torch.randn(1, count, shape[0])
    if kind != "none":
        exact, bits = linear.weight.float(), 4 if kind == "int4" else 8
        products.quantize(linear, CPU, kind)
        assert linear.weight.nbytes == shape[1] * -(-shape[0] // 128) * 128 * bits // 8
        error = (products.dequantized(linear, torch.float32) - exact).norm() / exact.norm()
        assert 0 < error < {"int8": 5e-3, "fp8": 3e-2, "int4": 8e-2}[kind]
    ours = Product(linear, EVERY)
    with torch.inference_mode():
        found, expected = ours(rows), linear(rows)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours(rows), found)
        for chosen in ([0], [count - 1], [count - 1, 0, count // 2]):
            assert torch.equal(ours(rows[:, chosen]), found[:, chosen])
        if shape[1] % 2 == 0:
            expected = kernels.gated(found, 0)
            torch.testing.assert_close(ours.gated(rows, 0), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", *products.WEIGHTS])
@pytest.mark.parametrize(
    ("count", "shape"),
    [(64, (40, 130)), (3, (64, 64)), (66, (33, 5)), (600, (16, 70)), (70, (4200, 66))],
)
def test_a_product_gives_a_row_its_bits(
    count: int, shape: tuple[int, int], kind: QuantizationName, interpreted: Run
) -> None:
    """Law: the product is that of torch, and a row is bit-identical alone and among others, in any
    place; also with more rows than one grid takes, with split sums, and with quantized weights,
    where torch multiplies the dequantized ones."""
    interpreted(check_products, count, shape, kind)


def check_quantized(kind: QuantizationName, served: str, *refused: str) -> None:
    def load(folder: str) -> Any:
        return load_model(
            folder, role="target", device="cpu", dtype="float16", quantization=kind
        )  # interpreted, Triton does not support bfloat16

    with (
        patch.object(loader, "has_kernels", lambda device: True),
        patch.object(loader, "read_llama", lambda *_: None),
    ):
        loaded = load(served)
        assert (loaded.quantization, loaded.dtype) == (kind, torch.float16)
        linear = [m for m in loaded.model.base_model.modules() if type(m) is torch.nn.Linear]
        assert {part.weight.dtype for part in linear} == {torch.int16}
        part = weights_of(loaded)
        held = (*loaded.model.parameters(), *loaded.model.buffers())
        assert part.size == sum(t.nbytes for t in held)
        assert part.note == f"float16, linear layers {kind}"
        whole = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float16)
        exact, expected = reference(whole, "it"), reference(loaded.model, "it")
        allowed = {"int8": 0.1, "fp8": 0.3, "int4": 1.0}[kind]
        assert 0 < (expected - exact).abs().max() < allowed * exact.abs().max()
        ids = torch.tensor([[3, 4]])
        with patch.object(products, "dequantized", None):  # torch must not be called
            loaded.logits(ids, torch.tensor([[0, 1]]), 2, whole_sequence(loaded, 2)())
        assert loader._batch_invariant(loaded, expected, "it").batch_invariant
        for folder in refused:
            with pytest.raises(ModelError, match=f"as {kind}: there are no fused layers for its"):
                load(folder)
        with (
            patch.object(fused_layers_module, "added", None),
            pytest.raises(ModelError, match=f"as {kind}: its fused layers fail"),
        ):
            load(served)


@pytest.mark.parametrize("kind", products.WEIGHTS)
def test_our_products_serve_quantized_weights(
    kind: QuantizationName, tmp_path: Path, interpreted: Run
) -> None:
    """Law: all layers hold quantized weights alone, which our kernel multiplies; other families,
    mixtures of experts, and models for which our layers fail are refused."""
    models = (model_of("llama"), tiny.FAMILIES["gpt_neox"](), model_of("mixtral"))
    folders = [tiny.save(model, tmp_path / str(i)) for i, model in enumerate(models)]
    interpreted(check_quantized, kind, *folders)


def check_steady() -> None:
    model = model_of("gemma2")
    shapes, expected = probe_layers(model, "it"), reference(model, "it")
    fused = fused_layers(model, shapes)
    assert make_batch_invariant(fused) is None
    backend, call = TritonBackend(CPU, *[Splitting(2, 32)] * 2), ModuleCall(fused)

    @torch.inference_mode()
    def forward(segments: Sequence[Segment], plane: Plane) -> Tensor:
        batch = Batch.pack(segments, CPU)
        with patch.object(torch.nn.functional, "linear", None):  # must not be called
            prepared = backend.prepare(plane, batch.spans)
            return call(batch.input_ids, batch.position_ids, batch.keep, prepared)

    assert is_proven(forward, shapes, expected, model)
    tokens, blocks = [(7 * i) % 120 + 4 for i in range(70)], [8, 1, 2, 3, 4]
    planes = [Plane(shapes, 9, block_size=16, dtype=torch.float32, device=CPU) for _ in range(2)]
    whole = forward([Segment(tokens, 0, blocks, 3)], planes[0])
    forward([Segment(tokens[:3], 0, blocks, 1)], planes[1])
    forward([Segment(tokens[3:67], 3, blocks, 1)], planes[1])
    beside = Segment(tokens[:9], 0, [6], 9)
    verified = forward([beside, Segment(tokens[67:], 67, blocks, 3)], planes[1])
    assert torch.equal(verified[9:], whole)
    nodes, parents = [tokens[67], 9, tokens[68], 11, tokens[69]], [-1, -1, 0, 0, 2]
    tree = forward([beside, Segment(nodes, 67, blocks, 5, parents)], planes[1])
    assert torch.equal(tree[9:][[0, 2, 4]], whole)
    decoded = [forward([Segment([tokens[i]], i, blocks, 1)], planes[1]) for i in (67, 68, 69)]
    assert torch.equal(torch.cat(decoded), whole)


def test_a_steady_model_gives_a_row_its_bits(interpreted: Run) -> None:
    """Law: a row's logits are bit-identical in a prompt of more rows than one tile of the attention
    kernel, after that prompt in two chunks, beside another sequence, as a tree's node, and in
    decode steps."""
    interpreted(check_steady)


def check_loading(served: str, refused: str) -> None:
    class Wrong(Product):
        def __call__(self, rows: Tensor) -> Tensor:
            return super().__call__(rows) * 1.1

    with (
        patch.object(loader, "has_kernels", lambda device: device == CPU),
        patch.object(loader, "read_llama", lambda *_: None),
    ):
        models = [
            load_model(folder, role="target", device="cpu", dtype="float32")
            for folder in (served, refused)
        ]
        wanted = [reference(model.model, "it") for model in models]
        found = loader._batch_invariant(models[0], wanted[0], "it")
        assert found.batch_invariant
        assert replace(found, dtype=torch.bfloat16).exact
        with pytest.raises(ModelError, match="there are no fused layers"):
            loader._batch_invariant(models[1], wanted[1], "it")
        with (
            patch.object(fused_layers_module, "Product", Wrong),
            pytest.raises(ModelError, match="fail the logits check"),
        ):
            loader._batch_invariant(models[0], wanted[0], "it")


def test_the_loader_says_why_a_model_is_not_steady(tmp_path: Path, interpreted: Run) -> None:
    """Law: with batch_invariant, a loaded model is proven to be so, or the error says why not."""
    served = tiny.save(model_of("llama"), tmp_path / "served")
    refused = tiny.save(tiny.FAMILIES["gpt_neox"](), tmp_path / "refused")
    interpreted(check_loading, served, refused)


def test_steady_attention_is_our_kernel() -> None:
    """Law: also for prompts; any other named backend, and any other device, is refused."""

    def choose(wanted: AttentionName, device: str) -> AttentionName:
        where, shapes = torch.device(device), [LayerShape(0, 2, 64, 64)]
        return choose_attention(
            wanted, where, dtype=torch.bfloat16, layers=shapes, batch_invariant=True
        )

    assert choose("auto", "cuda") == choose("triton", "cuda") == "triton"
    with pytest.raises(ConfigError, match="batch_invariant needs .* but attention is 'sdpa'"):
        choose("sdpa", "cuda")
    with pytest.raises(ConfigError, match="but the device is cpu"):
        choose("auto", "cpu")


def check_other_cache() -> None:
    model = model_of("qwen3")
    shapes = probe_layers(model, "it")
    found = []
    for run in (ModuleCall(model), ModuleCall(fused_layers(model, shapes))):
        plane = Plane(shapes, 4, block_size=4, dtype=torch.bfloat16, device=CPU)
        prepared = SdpaBackend(CPU).prepare(plane, [Span(0, 3, 0, [2])])
        with torch.inference_mode():
            ids, places = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]])
            found.append(run(ids, places, 3, prepared))
        assert plane.stacks[0][1][:, :, 8:11].count_nonzero() > 0
    torch.testing.assert_close(*found, rtol=0, atol=3e-2)  # keys are rounded in another place


def test_a_cache_of_another_dtype_is_generated_attention(interpreted: Run) -> None:
    """Law: the fused rotary kernel never writes to a cache of another dtype than the model's."""
    interpreted(check_other_cache)


def test_unsupported_layers_are_not_fused() -> None:
    """Law: another family, or biases on only some parts of a joined product, is not fused."""
    model = tiny.FAMILIES["gpt_neox"]()
    register()
    model.set_attn_implementation(NAME)
    assert fused_layers(model, probe_layers(model, "it")) is None
    model = model_of("llama")
    attention = model.base_model.layers[1].self_attn
    attention.k_proj.bias = torch.nn.Parameter(torch.zeros(len(attention.k_proj.weight)))
    assert fused_layers(model, probe_layers(model, "it")) is None
    model = model_of("mixtral")
    assert "expert" in str(make_batch_invariant(fused_layers(model, probe_layers(model, "it"))))


TILED = [
    (kind, tile)
    for kind in ("none", *products.WEIGHTS)
    for tile in (products.TILES if kind == "none" else products.QUANTIZED).values()
]
CONSTANTS: dict[str, list[dict[str, Any]]] = {
    "add_rows": [
        {"WIDTH": width, "LANES": triton.next_power_of_2(width), "ADDS": 1, "POST": post, "PRE": 1}
        for width in (2048, 5376, 16384)
        for post in (0, 1)
    ],
    "rotate_heads": [
        {
            "HEADS": 32, "KV_HEADS": 8, "DIM": dim, "ROTARY": rotary, "REST": 64, "NORMS": 1,
            "LANES": triton.next_power_of_2(rotary // 2), "WRITES": 1,
        }
        for dim, rotary in ((128, 128), (96, 72), (256, 256))
    ],
    "gate_rows": [{"WIDTH": 14336, "LANES": kernels.GATED, "ACTIVATION": i} for i in (0, 1)],
    "multiply_rows": [
        {
            "ROWS": tile.rows, "OUTS": tile.outs, "STEP": tile.step, "EVEN": even, "PARTS": parts,
            "BIASED": 1, "GATE": gate, "KIND": kind,
        }
        for kind, tile in TILED
        for even, parts, gate in ((1, 1, 0), (0, 1, -1), (1, 4, 0), (1, 4, -1))
    ],
}  # fmt: skip
FLOATS = ("factor", "offset", "post_epsilon", "pre_epsilon", "query_epsilon", "key_epsilon")
NUMBERS = (
    "step", "normed_step", "key_head", "key_slot", "value_head", "value_slot", "count", "OUT", "IN",
    "EACH",
)  # fmt: skip


def options_of(constants: dict[str, Any]) -> dict[str, int]:
    """Return the compile options of `multiply_rows`."""
    given = tuple(constants.get(name) for name in ("KIND", "ROWS", "OUTS"))
    tile = next((tile for kind, tile in TILED if (kind, *tile[:2]) == given), TILED[0][1])
    return {"num_warps": tile.warps, "num_stages": tile.stages}


@pytest.mark.parametrize("name", CONSTANTS)
def test_compiles_for_an_h100(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the kernels compile without a device, no register spills to memory (but a few in the
    largest quantized products), and products use the matrix instruction of an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = getattr(products if name == "multiply_rows" else kernels, name)
    known = dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(NUMBERS, "i32")
    known |= {"slots": "*i64", "sums": "*fp32", "arrived": "*i32", "scales": "*fp32"}
    for constants in CONSTANTS[name]:
        known["weight"] = "*bf16" if constants.get("KIND", "none") == "none" else "*i16"
        types = {each: known.get(each, "*bf16") for each in kernel.arg_names}
        types |= dict.fromkeys(constants, "constexpr")
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, kind in enumerate(types.values())
            if kind not in ("fp32", "constexpr")
        }
        options: dict[str, Any] = {
            "add_rows": {"num_warps": kernels.warps_of(constants.get("LANES", 1))},
            "rotate_heads": {"num_warps": 1},
            "multiply_rows": options_of(constants),
        }.get(name, {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own warnings
            source = ASTSource(kernel, types, constants, aligned)
            built = triton.compile(source, GPUTarget("cuda", 90, 32), options)
        (tmp_path / "kernel.cubin").write_bytes(built.asm["cubin"])
        program = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
        used = subprocess.run(
            [program, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True
        )
        (stack,) = re.findall(r"STACK:(\d+)", used.stdout)
        spills = constants.get("KIND", "none") != "none" and constants["ROWS"] == 128
        assert int(stack) <= (512 if spills else 0)
        if name == "multiply_rows":
            assert "wgmma" in built.asm["ptx"]
            large = constants["ROWS"] == 128
            assert built.metadata.shared <= (products.SHARED if large else 99 << 10)

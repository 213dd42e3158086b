"""`python -m engine.lab.synthetic`: write a random target and a draft with a chosen acceptance, as
two folders for `foredraft serve --target DIR/target --draft DIR/draft`.

For measurements only: the cost of a step does not depend on the values of the weights. Acceptance
is the mean of the acceptances at temperature 0 and 1. Prints a table of the scales it tries, then
the pair's acceptance on other texts, and writes the pair. The same arguments give the same weights.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from engine.arguments import Parser, exit_code, number, whole
from engine.config import BUILTIN, model_folder
from engine.demo.tokens import SPECIAL, VOCABULARY
from engine.errors import ConfigError
from engine.lab.bench.options import set_threads
from engine.lab.files import new_folder
from engine.lab.train.agreement import Agreement, matched
from engine.model.loader import pick_device

# The draft has the target's first layers. Later layers write to the residual stream through scaled
# projections: at scale 0 both models are equal, and a larger scale lowers acceptance. The constants
# below avoid text that loops at temperature 0: attention looks at a few tokens at random distances,
# so that the next token depends on many, and the head's logits are large enough for a clear
# favourite (the likeliest token has a probability of about 0.7). Acceptance is measured with whole
# models (lab.train.agreement) on text that the draft writes at temperature 1. The source of the
# text does not matter: each next token is a pseudo-random function of its context.
HEAD_DIM = 64
POSITIONS = 2048  # the tokenizer's model_max_length
MOST_POSITIONS = 1 << 17
QUERY_KEY = 1.8  # standard deviation of queries and of keys; that of attention scores is its square
EMBEDDING = 0.7  # standard deviation of the embedding; the draft's layers add summands near 1
LOGITS = 9.0
SMALLEST, LARGEST = 100_000, 4_000_000_000  # parameters
PROMPT, LENGTH = 16, 128  # tokens of a text: random ones before it, not counted; its own
CHECKS = 3  # other texts on which the chosen scale is checked
STEPS = 7  # bisection steps
LOUDEST, QUIETEST = 0.0, -9.0  # log2 of the scale
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def config_of(
    width: int, layers: int, inner: int, heads: int, kv_heads: int, **others: Any
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        **{"head_dim": HEAD_DIM, "vocab_size": VOCABULARY, **others},
    )


def parameters_of(config: LlamaConfig, layers: int) -> int:
    """Return the number of parameters with this many layers, embedding and head included."""
    of: Any = config  # its types are too wide
    width, heads = of.hidden_size, of.num_attention_heads + of.num_key_value_heads
    one = 2 * width * of.head_dim * heads + 3 * width * of.intermediate_size + 2 * width
    return int(layers * one + (2 * of.vocab_size + 1) * width)


def sized(parameters: float) -> LlamaConfig:
    """Return a config of about this many parameters, in the proportions of small Llamas: 0.3e9 is
    25 layers of width 1024, 1e9 about 38 of width 1536; 4 heads per KV head where they divide."""
    step = 256 if parameters > 5e7 else HEAD_DIM
    width = max(step, round((parameters / 0.27) ** (1 / 3) / step) * step)
    heads = width // HEAD_DIM
    kv_heads = heads // 4 if heads % 4 == 0 else heads
    config = config_of(width, 1, width * 11 // 4 // 64 * 64, heads, kv_heads)
    base, one = parameters_of(config, 0), parameters_of(config, 1)
    config.num_hidden_layers = max(2, round((parameters - base) / (one - base)))
    return config


def config_named(size: str) -> LlamaConfig:
    """Return the config of `8b` (as Llama 3.1 8B) or of a number of parameters. Raises
    ArgumentTypeError."""
    if size.lower() == "8b":
        return config_of(4096, 32, 14336, 32, 8, head_dim=128, vocab_size=128256)
    return sized(number(SMALLEST, LARGEST)(size))


@torch.inference_mode()
def random_target(
    config: LlamaConfig, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """Return a LlamaForCausalLM made on `device`, with unscaled weights that are exact in bfloat16.
    The same arguments give the same weights."""
    model = _empty(config, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        parameter.normal_(0.0, _deviation(name, parameter), generator=generator)
        parameter.copy_(parameter.bfloat16())
    model.lm_head.weight[: len(SPECIAL)] = 0  # keeps EOS unlikely: texts end at their limit
    return model


def _empty(config: LlamaConfig, device: str | torch.device, dtype: torch.dtype) -> Any:
    build: Any = LlamaForCausalLM
    with torch.device(device):
        model = build._from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def _deviation(name: str, weight: Tensor) -> float:
    """Return the deviation of a weight that gives outputs of the wanted size for inputs of 1."""
    if "embed_tokens" in name:
        return EMBEDDING
    gain = {"q_proj": QUERY_KEY, "k_proj": QUERY_KEY, "lm_head": LOGITS}
    wanted = next((gain[part] for part in name.split(".") if part in gain), 1.0)
    if "down_proj" in name:
        wanted = 1.7  # silu(gate) * up is smaller than its inputs
    return float(wanted / weight.shape[1] ** 0.5)


@torch.inference_mode()
def draft_of(target: Any, layers: int) -> Any:
    """Return a model of the target's first `layers` layers, embedding, norm and head."""
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": layers})
    draft = _empty(config, target.device, target.dtype)
    names = draft.state_dict().keys()
    draft.load_state_dict({k: v for k, v in target.state_dict().items() if k in names})
    return draft


def scaler(target: Any, layers: int) -> Callable[[float], None]:
    """Return a function that scales the outputs of the layers after the first `layers`; the weights
    stay exact in bfloat16."""
    modules = [(layer.self_attn.o_proj, layer.mlp.down_proj) for layer in target.model.layers]
    weights = [module.weight for pair in modules[layers:] for module in pair]
    full = [weight.to(torch.bfloat16, copy=True) for weight in weights]

    @torch.inference_mode()
    def scale(factor: float) -> None:
        for weight, unscaled in zip(weights, full, strict=True):
            weight.copy_((unscaled.float() * factor).bfloat16())

    return scale


class Text:
    """About `tokens` tokens of text that the draft writes, with its logits."""

    def __init__(self, draft: Any, tokens: int, seed: int) -> None:
        self._generator = torch.Generator(draft.device).manual_seed(seed)
        self.ids = self._write(draft, max(1, tokens // LENGTH))
        self._logits = self.logits(draft)

    @torch.inference_mode()
    def _write(self, draft: Any, sequences: int) -> Tensor:
        """Sample ids `[sequences, PROMPT + LENGTH]`; `generate` would use the global generator,
        and would not end where kernels compute nothing (tests/cuda_host)."""
        known, shape = (len(SPECIAL), draft.config.vocab_size), (sequences, PROMPT)
        ids = torch.randint(*known, shape, generator=self._generator, device=draft.device)
        given, past = ids, None
        for _ in range(LENGTH):
            output = draft(given, past_key_values=past, use_cache=True)
            past, chances = output.past_key_values, output.logits[:, -1].softmax(-1)
            given = torch.multinomial(chances, 1, generator=self._generator)
            ids = torch.cat([ids, given], dim=1)
        return ids

    @torch.inference_mode()
    def logits(self, model: Any) -> Tensor:
        """Return float32 logits `[tokens, vocabulary]` for the tokens after the prompts. Runs one
        text at a time to save memory."""
        rows = [model(one[None], use_cache=False).logits[0, PROMPT:] for one in self.ids]
        return torch.cat(rows).float()

    @torch.inference_mode()
    def agreement(self, target: Any) -> Agreement:
        """Return the target's agreement with the draft that wrote this text."""
        same, drawn, count = matched(self.logits(target), self._logits).tolist()
        return same / count, drawn / count


def find_scale(wanted: float, measure: Callable[[float], Agreement]) -> float:
    """Return the scale whose mean agreement is nearest to `wanted`, by bisection of its logarithm.
    Agreement falls as the scale grows. Returns the best scale seen, so late noise does no harm."""
    low, high = QUIETEST, LOUDEST
    far: dict[float, float] = {}  # distance from `wanted` by scale
    for _ in range(STEPS):
        middle = (low + high) / 2
        found = mean(measure(2.0**middle))
        far[2.0**middle] = abs(found - wanted)
        low, high = (middle, high) if found > wanted else (low, middle)
    return min(far, key=lambda scale: far[scale])


def save(folder: Path, target: Any, draft: Any, dtype: torch.dtype) -> None:
    """Convert both models to `dtype` and save them with the built-in pair's tokenizer, as the
    folders `target` and `draft`."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for role, model in (("target", target), ("draft", draft)):
        model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=[0, 2])  # type: ignore[no-untyped-call]
        model.to(dtype).save_pretrained(folder / role)  # its config.json says the model's type
        for name in TOKENIZER:
            shutil.copyfile(Path(model_folder(BUILTIN, "target"), name), folder / role / name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 2 for invalid arguments."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("python -m engine.lab.synthetic", lambda: run(parsed))


def run(parsed: argparse.Namespace) -> int:
    """Make and write the pair; return the exit code. Raises EngineError."""
    device = str(pick_device(parsed.device))
    config: LlamaConfig = parsed.parameters
    config.max_position_embeddings = parsed.positions
    if parsed.draft_layers >= (layers := config.num_hidden_layers):
        raise ConfigError(
            f"--draft-layers is {parsed.draft_layers}; the target has {layers} layers, so allowed"
            f" are 1 to {layers - 1}"
        )
    set_threads(None)
    with new_folder(parsed.output) as folder:
        write(parsed, config, device, folder)
    print(f"written: {Path(parsed.output, 'target')} and {Path(parsed.output, 'draft')}")
    return 0


def build_parser() -> Parser:
    parser = Parser("python -m engine.lab.synthetic", __doc__)
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="new folder")
    add("--parameters", type=config_named, default="3e8", metavar="N",
        help="approximate parameters of the target, or `8b`: as Llama 3.1 8B (3e8)")  # fmt: skip
    add("--positions", type=whole(256, MOST_POSITIONS), default=POSITIONS, metavar="N",
        help=f"longest sequence ({POSITIONS})")  # fmt: skip
    add("--draft-layers", type=whole(1, 1000), default=1, metavar="N",
        help="how many the draft shares (1)")  # fmt: skip
    add("--acceptance", type=number(0.05, 0.99), default=0.8, metavar="A", help="wanted (0.8)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where it is made (cpu)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the weights")
    add("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="of the weights (0)")
    add("--tokens", type=whole(128, 1 << 16), default=768, metavar="N",
        help="of text to measure acceptance on (768)")  # fmt: skip
    return parser


def write(parsed: argparse.Namespace, config: LlamaConfig, device: str, folder: Path) -> None:
    """Build, calibrate and save the pair, on CUDA in bfloat16, else in float32; print a line for
    each scale that is tried."""
    layers, of_all = parsed.draft_layers, config.num_hidden_layers
    print(
        f"target {parameters_of(config, of_all) / 1e6:.1f} M parameters, {of_all} layers of "
        f"width {config.hidden_size}; draft {parameters_of(config, layers) / 1e6:.1f} M,"
        f" {layers} of them",
        flush=True,
    )
    print("     scale     T=0    T=1   mean", flush=True)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    target = random_target(config, parsed.seed, device, dtype)
    draft = draft_of(target, layers)
    text, rescale = Text(draft, parsed.tokens, parsed.seed), scaler(target, layers)

    def measure(scale: float) -> Agreement:
        rescale(scale)
        return shown(f"{scale:.5f}", text.agreement(target))

    rescale(find_scale(parsed.acceptance, measure))
    for other in range(parsed.seed + 1, parsed.seed + 1 + CHECKS):
        shown(f"other text {other}", Text(draft, parsed.tokens, other).agreement(target))
    save(folder, target, draft, getattr(torch, parsed.dtype))


def shown(name: str, found: Agreement) -> Agreement:
    print(f"{name:>12}  {found[0]:.3f}  {found[1]:.3f}  {mean(found):.3f}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())

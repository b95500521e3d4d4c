"""Trains Othello-GPT (Patch-free: 6 layers, 8 heads, d 128, GELU, learned positions) and writes it as a GPT-2
that Hugging Face reads, in float16.

    python -m examples.othello.train_model --seed 1 --to examples/othello/models/seed-1

Targets are soft: uniform over the moves that the rules allow, which is what uniformly random games teach in
the end. Muon moves the blocks' matrices, AdamW everything else; the rate falls to nothing at the last step.
`--resume` goes on from the checkpoint that every minute leaves beside the output.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.othello.game import Games, random_games

LAYERS, HEADS, WIDTH, VOCABULARY, BLOCK = 6, 8, 128, 61, 59
HELD_OUT_SEED = 1_000_000  # of the games that no model sees; training seeds start at seed × 10⁷


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, head, token, d_head)
        x = x + self.out(z.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class OthelloGPT(nn.Module):
    """The model as it is trained; `hugging_face` has the same weights under GPT-2's names."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * LAYERS) if deep else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))  # (batch, token, vocabulary)

    def hugging_face(self) -> dict[str, Tensor]:
        """GPT-2's names; its Conv1D weights are (in, out)."""
        named = {
            "transformer.wte.weight": self.tokens.weight,
            "transformer.wpe.weight": self.positions.weight,
            "transformer.ln_f.weight": self.ln_f.weight,
            "transformer.ln_f.bias": self.ln_f.bias,
            "lm_head.weight": self.head.weight,
        }
        for at, block in enumerate(self.blocks):
            into = f"transformer.h.{at}."
            for ours, theirs in (("ln_1", "ln_1"), ("ln_2", "ln_2")):
                norm = getattr(block, ours)
                named |= {f"{into}{theirs}.weight": norm.weight, f"{into}{theirs}.bias": norm.bias}
            for ours, theirs in (
                ("qkv", "attn.c_attn"),
                ("out", "attn.c_proj"),
                ("up", "mlp.c_fc"),
                ("down", "mlp.c_proj"),
            ):
                linear = getattr(block, ours)
                named |= {f"{into}{theirs}.weight": linear.weight.T, f"{into}{theirs}.bias": linear.bias}
        return {name: tensor.detach().contiguous() for name, tensor in named.items()}

    def begin_from(self, folder: Path) -> None:
        """Takes the weights of a folder that `write` left."""
        from safetensors.torch import load_file

        saved = load_file(str(folder / "model.safetensors"))
        with torch.no_grad():
            for name, ours in self.hugging_face().items():
                ours.copy_(saved[name].float())  # most of these share memory with the parameters
            for at, block in enumerate(self.blocks):
                for linear, theirs in (
                    (block.qkv, "attn.c_attn"),
                    (block.out, "attn.c_proj"),
                    (block.up, "mlp.c_fc"),
                    (block.down, "mlp.c_proj"),
                ):
                    linear.weight.copy_(saved[f"transformer.h.{at}.{theirs}.weight"].float().T)


CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_embd": WIDTH,
    "n_positions": BLOCK,
    "vocab_size": VOCABULARY,
    "activation_function": "gelu",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "dtype": "float16",
}


def batch_of(games: Games) -> tuple[Tensor, Tensor]:
    """Inputs (n, 59) and targets (n, 59, 61): uniform over the legal moves, zero once the game is over."""
    legal = torch.from_numpy(games.legal_tokens()[:, :BLOCK]).float()
    return torch.from_numpy(games.tokens[:, :BLOCK]), legal / legal.sum(-1, keepdim=True).clamp(min=1)


def illegality(likely: Tensor, targets: Tensor) -> Tensor:
    """-log of the probability on legal moves, a mean over positions from which the game goes on.
    likely (n, 59, 61) log-probabilities, targets (n, 59, 61) as `batch_of` gives them."""
    legal = targets > 0
    return -likely.masked_fill(~legal, -torch.inf).logsumexp(-1)[legal.any(-1)].mean()


@torch.no_grad()
def legal_rates(logits: Tensor, legal: Tensor) -> tuple[float, float]:
    """How often the most likely token is legal, and the mean probability of all legal ones, over positions
    from which the game goes on. logits (n, 59, 61), legal (n, 59, 61) bool."""
    on = legal.any(-1)
    top = legal.gather(-1, logits.argmax(-1, keepdim=True))[..., 0]
    mass = (logits.softmax(-1) * legal).sum(-1)
    return float(top[on].float().mean()), float(mass[on].mean())


def optimisers(model: OthelloGPT, rate: float, muon_rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2]
    decayed = [p for name, p in model.named_parameters() if not name.startswith("blocks") and p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim == 1]
    return [
        torch.optim.Muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
            lr=rate,
            betas=(0.9, 0.95),
        ),
    ]


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    model = OthelloGPT()
    if options.start:
        model.begin_from(options.start)
    steps_of = optimisers(model, options.rate, options.muon_rate)
    first = [[group["lr"] for group in one.param_groups] for one in steps_of]
    held_out = random_games(1000, HELD_OUT_SEED)
    checkpoint = options.to.parent / f"{options.to.name}.training.pt"
    step, spent, shown = 0, 0.0, 0.0
    if options.resume and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for one, state in zip(steps_of, saved["optimisers"], strict=True):
            one.load_state_dict(state)
        step, spent = saved["step"], saved["spent"]
    started, told = time.monotonic() - spent, time.monotonic()
    options.to.parent.mkdir(parents=True, exist_ok=True)
    while step < options.steps:
        spent = time.monotonic() - started
        scale = min(1.0, (step + 1) / 50, (1 - step / options.steps) / options.fall)
        for one, rates in zip(steps_of, first, strict=True):
            for group, rate in zip(one.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        inputs, targets = batch_of(random_games(options.batch, options.seed * 10_000_000 + step))
        likely = model(inputs).log_softmax(-1)
        loss = -(targets * likely).sum() / targets.sum()
        objective = loss + options.legal * illegality(likely, targets) if options.legal else loss
        for one in steps_of:
            one.zero_grad()
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in steps_of:
            one.step()
        step += 1
        shown = loss.item() if not shown else 0.98 * shown + 0.02 * loss.item()
        if time.monotonic() - told > options.every:
            told = time.monotonic()
            inputs, _ = batch_of(held_out.part(0, 200))
            with torch.no_grad():
                logits = model(inputs)
            legal = torch.from_numpy(held_out.legal_tokens()[:200, :BLOCK])
            top, mass = legal_rates(logits, legal)
            print(
                f"{spent / 60:.1f} min, step {step}: loss {shown:.4f} nats, legal top-1 {top:.4f},"
                f" legal mass {mass:.4f}",
                flush=True,
            )
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimisers": [one.state_dict() for one in steps_of],
                    "step": step,
                    "spent": spent,
                },
                checkpoint,
            )
    write(model, options.to, record(options, step, spent))
    checkpoint.unlink(missing_ok=True)


def record(options: argparse.Namespace, steps: int, seconds: float) -> dict[str, object]:
    """What a training was: steps, games and minutes in all, and its parts where it went on from another."""
    own: dict[str, object] = {
        "seed": options.seed,
        "steps": steps,
        "games": steps * options.batch,
        "minutes": round(seconds / 60, 1),
        "schedule": f"--rate {options.rate:g} --muon-rate {options.muon_rate:g} --fall {options.fall:g}",
    }
    if options.legal:
        own["schedule"] += f" --legal {options.legal:g}"
    if not options.start:
        return own
    before = json.loads((options.start / "training.json").read_text(encoding="utf-8"))
    parts = [*before.pop("parts", [before]), own]
    sums = {key: round(sum(part[key] for part in parts), 1) for key in ("steps", "games", "minutes")}
    return {"seed": before["seed"], **sums, "parts": parts}


def write(model: OthelloGPT, to: Path, record: dict[str, object]) -> None:
    from safetensors.torch import save_file

    to.mkdir(parents=True, exist_ok=True)
    half = {name: tensor.half() for name, tensor in model.hugging_face().items()}
    save_file(half, str(to / "model.safetensors"), metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    (to / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What `train` wants, from a command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--batch", type=int, default=64, help="games a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW's")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--fall", type=float, default=0.7, help="over which last part the rate falls to 0")
    parser.add_argument("--legal", type=float, default=0.0, help="weight of -log(probability on legal moves)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=float, default=60, help="seconds between reports")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--start", type=Path, help="a finished model's folder, to go on from its weights")
    return parser.parse_args(given)


def main() -> None:
    train(arguments())


if __name__ == "__main__":
    main()

"""
The table of what a refresh takes, in docs/how-to/refresh-the-draft.md: `python -m docs.sizing`.

Three pairs by their published shapes, on one kind of GPU; `appliance.drafts.sizing` computes each figure.
"""

from pathlib import Path

from appliance.drafts.sizing import Gpu, Head, Plan, Source, Target

PAGE = Path(__file__).parent / "how-to" / "refresh-the-draft.md"
BEGIN, END = "<!-- Written by `python -m docs.sizing`. -->\n", "<!-- Until here. -->\n"

H100 = Gpu(name="H100 SXM, 80 GB", memory=80 * 10**9, peak=989.4e12)
"""NVIDIA's data sheet: 80 GB; 1,979 TFLOPS in bfloat16 with sparsity, half of that without."""

# Shapes as in each model's config.json; heads as SpecForge's configs have them (llama3-70B-ealge3.json,
# qwen3-30B-A3B-eagle3.1.json; the 8B alike), with 32,000 tokens to propose.
PAIRS = (
    (
        Target(
            name="Llama-3.1-8B",
            hidden=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            intermediate=14336,
            vocabulary=128256,
        ),
        Head(
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            intermediate=14336,
            draft_vocabulary=32000,
            target_hidden=4096,
        ),
    ),
    (
        Target(
            name="Llama-3.1-70B",
            hidden=8192,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
            intermediate=28672,
            vocabulary=128256,
        ),
        Head(
            hidden=8192,
            heads=64,
            kv_heads=8,
            head_dim=128,
            intermediate=28672,
            draft_vocabulary=32000,
            target_hidden=8192,
        ),
    ),
    (
        Target(
            name="Qwen3-30B-A3B",
            hidden=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            head_dim=128,
            intermediate=768,
            vocabulary=151936,
            experts=128,
            experts_per_token=8,
            norms_heads=True,
        ),
        Head(
            hidden=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            intermediate=12288,
            draft_vocabulary=32000,
            target_hidden=2048,
        ),
    ),
)


def plans() -> tuple[Plan, ...]:
    """The refreshes of the table."""
    return tuple(Plan(target=target, head=head, gpu=H100) for target, head in PAIRS)


def sizing_table() -> str:
    """The table as Markdown, one column for each pair."""
    columns = [_column(plan) for plan in plans()]
    lines = ["| | " + " | ".join(plan.target.name for plan in plans()) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    lines += [f"| {name} | " + " | ".join(column[name] for column in columns) + " |" for name in columns[0]]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table between its marks as it is computed now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{sizing_table()}\n{END}{after}"


def _column(plan: Plan) -> dict[str, str]:
    online, offline = Source.ONLINE, Source.OFFLINE
    return {
        "weights of the target, and those a token goes through": (
            f"{_billions(plan.target.parameters)}, {_billions(plan.target.active_parameters)}"
        ),
        "weights of the head": _billions(plan.head.parameters),
        "hidden states of one token": f"{plan.hidden_bytes() / 1024:.0f} KiB",
        "hidden states on disk, offline": _bytes(plan.hidden_disk(offline)),
        "hidden states at once, online": _bytes(plan.hidden_disk(online)),
        "registry: checkpoints and the draft": _bytes(plan.registry_disk),
        "memory for training, one GPU": _bytes(plan.training_memory),
        "GPUs, offline": str(plan.gpus(offline)),
        "GPUs, online (target + training)": (
            f"{plan.gpus(online)} ({plan.target_gpus} + {plan.training_gpus})"
        ),
        "hours, offline": f"{plan.seconds(offline) / 3600:.1f}",
        "hours, online": f"{plan.seconds(online) / 3600:.1f}",
    }


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f} B"


def _bytes(number: int) -> str:
    return f"{number / 1e12:.2f} TB" if number >= 10**12 else f"{number / 1e9:.1f} GB"


def main() -> None:
    """Write the table into its page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the table of {PAGE.name}")


if __name__ == "__main__":
    main()

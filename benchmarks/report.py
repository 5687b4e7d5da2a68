"""`benchmarks/README.md` from the results; what others wrote between the markers is kept as it is."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import text
from benchmarks.contestants import CONTESTANTS
from benchmarks.models import NETWORKS

Found = dict[str, Any]
BEGIN, END = "<!-- speed -->", "<!-- end of speed -->"
REGIONS = ("profile", "ways", "chance", "whole", "notes")


def write(results: Path, readme: Path) -> None:
    """Write the whole page."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    former = readme.read_text() if readme.exists() else ""
    kept = {name: region(former, name) or "\n" for name in REGIONS}
    steps = sorted(
        (f for f in found if f["kind"] == "step"), key=lambda f: (list(NETWORKS).index(f["network"]), f["batch"])
    )
    parts = [text.HEAD, _machine(found), _overview(steps), *map(_race, steps)]
    parts += [_by_batch(steps), _width(found), _groups(found), _decay(found), _epochs(found), _absent(found)]
    parts += [getattr(text, name.upper()).format(kept[name]) for name in REGIONS]
    readme.write_text("\n\n".join(part.strip("\n") for part in parts if part) + "\n")


def summary(results: Path) -> str:
    """The table of the project's README: the time of a step at the usual batch, relative to the fastest non-private one."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("step-*-128.json"))]
    found.sort(key=lambda f: list(NETWORKS).index(f["network"]))
    rows = [["without privacy, the fastest way", *("1" for _ in found)]]
    for title, keys in (
        ("**tacit**", ("tacit",)),
        ("Opacus, its fastest mode there", ("opacus-hooks", "opacus-functorch", "opacus-ew", "opacus-ghost")),
        ("JAX Privacy, compiled", ("jax-privacy",)),
        ("opake", ("opake",)),
    ):
        rows.append([title, *(_ratio(f, _quickest(f, keys), _fastest(f)) for f in found)])
    return _table(["time of a step, batch 128", *(NETWORKS[f["network"]].title for f in found)], rows)


def readme_with_summary(page: str, results: Path) -> str:
    """The project's README with the summary of today between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{summary(results)}\n{END}{after}"


def _quickest(found: Found, keys: Sequence[str]) -> str:
    times = {key: _times(found["contestants"].get(key, {})) for key in keys}
    return min(keys, key=lambda key: statistics.median(times[key]) if times[key] else float("inf"))


def region(page: str, name: str) -> str | None:
    """What stands between the markers of this name."""
    match = re.search(rf"<!-- {name} -->(.*?)<!-- /{name} -->", page, re.DOTALL)
    return match.group(1) if match else None


def with_region(page: str, name: str, content: str) -> str:
    """The page with something else between the markers."""
    return re.sub(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", lambda m: m[1] + content + m[2], page, flags=re.DOTALL)


def _machine(found: list[Found]) -> str:
    if not found:
        return "No results yet."
    facts = found[0]["machine"]
    every = {name: version for f in found for name, version in f["machine"]["versions"].items() if version}
    versions = ", ".join(f"{name} {version}" for name, version in every.items())
    dates = sorted({f["machine"]["date"] for f in found})
    others = [share for f in found for c in f["contestants"].values() for share in c.get("others", [])]
    busy = statistics.median(others) if others else 0.0
    loudest = _quantile(others, 0.9) if others else 0.0
    return (
        f"Measured {' to '.join(dict.fromkeys([dates[0], dates[-1]]))} on {facts['processor']}, {facts['cores']} cores, "
        f"{facts['threads']} threads, {facts['memory_gib']} GiB; Python {facts['python']}, {versions}. Other processes had "
        f"{busy:.0%} of the processor during the median turn, {loudest:.0%} or more in a tenth of them."
    )


def _overview(steps: list[Found]) -> str:
    """Ratios to the fastest non-private step, everybody at the usual batch."""
    usual = [f for f in steps if f["batch"] == 128]
    if not usual:
        return ""
    heads = ["batch 128", *(NETWORKS[f["network"]].title for f in usual)]
    rows = [[_title(key), *(_ratio(f, key, _fastest(f)) for f in usual)] for key in _present(usual)]
    return "## Time of a step, relative to the fastest non-private one\n\n" + _table(heads, rows)


def _race(found: Found) -> str:
    """Everything about one race."""
    network, fastest = NETWORKS[found["network"]], _fastest(found)
    heads = ["", "ms a step", "to non-private", "to tacit", "peak MiB", "first step s", "set-up", "relative error"]
    rows = []
    for key, result in found["contestants"].items():
        if not _times(result):
            continue
        error = result.get("error")
        verdict = "" if error is None else f"{error:.0e}" + ("" if result["agrees"] else " **differs**")
        rows.append(
            [
                _title(key),
                f"{statistics.median(_times(result)):.1f}",
                _ratio(found, key, fastest),
                _ratio(found, key, "tacit"),
                f"{result['memory_mb']:.0f}",
                f"{result['first_seconds']:.1f}",
                _setting(result, network.images),
                verdict,
            ]
        )
    rounds = max((len(_times(c)) for c in found["contestants"].values()), default=0)
    title = f"### {network.title}, {found['parameters']:,} parameters, batch {found['batch']} ({rounds} rounds)"
    return title + "\n\n" + _table(heads, rows)


def _setting(result: Found, images: bool) -> str:
    words = [result["layout"]] if images else []
    if result["physical"]:
        words.append(f"in pieces of {result['physical']}")
    return ", ".join(words)


def _by_batch(steps: list[Found]) -> str:
    """How tacit and plain training grow with the batch."""
    rows = []
    for f in steps:
        plain, private = f["contestants"].get("plain-nhwc", {}), f["contestants"].get("tacit", {})
        if not _times(plain) or not _times(private):
            continue
        times = [1000 * statistics.median(_times(c)) / f["batch"] for c in (plain, private)]
        memory = [f"{c['memory_mb']:.0f}" for c in (plain, private)]
        ratio = _ratio(f, "tacit", "plain-nhwc")
        rows.append([NETWORKS[f["network"]].title, str(f["batch"]), *(f"{t:.0f}" for t in times), ratio, *memory])
    heads = ["", "batch", "plain, µs an example", "tacit, µs an example", "ratio", "plain, MiB", "tacit, MiB"]
    return "## Growth\n\nWith the batch; plain is channels last:\n\n" + _table(heads, rows) if rows else ""


def _width(found: list[Found]) -> str:
    races = sorted((f for f in found if f["kind"] == "width"), key=lambda f: f["parameters"])
    rows = []
    for f in races:
        results = [f["contestants"][key] for key in ("plain-nhwc", "tacit") if key in f["contestants"]]
        if len(results) == 2 and all(map(_times, results)):
            times = [f"{statistics.median(_times(c)):.0f}" for c in results]
            memory = [f"{c['memory_mb']:.0f}" for c in results]
            rows.append(
                [
                    NETWORKS[f["network"]].title,
                    f"{f['parameters']:,}",
                    *times,
                    _ratio(f, "tacit", "plain-nhwc"),
                    *memory,
                ]
            )
    heads = ["", "parameters", "plain, ms", "tacit, ms", "ratio", "plain, MiB", "tacit, MiB"]
    return "With the parameters, batch 128:\n\n" + _table(heads, rows) if rows else ""


def _groups(found: list[Found]) -> str:
    """What more groups and what the noise cost: races of tacit with itself."""
    races = sorted((f for f in found if f["kind"] == "groups"), key=lambda f: list(NETWORKS).index(f["network"]))
    keys = {
        "tacit-2": "2 groups, to one",
        "tacit-10": "10 groups, to one",
        "tacit-40": "40 groups, to one",
        "tacit-no-noise": "no ledger and no noise, to both",
    }
    rows = []
    for f in races:
        flat, best = f["contestants"].get("tacit", {}), _fastest(f)
        if _times(flat):
            own = f"{statistics.median(_times(flat)):.1f}"
            ratios = (_ratio(f, key, "tacit") for key in keys)
            rows.append([NETWORKS[f["network"]].title, own, _ratio(f, "tacit", best), *ratios])
    title = "With the number of groups that are clipped separately, and without noise, batch 128:\n\n"
    return title + _table(["", "ms a step", "to non-private", *keys.values()], rows) if rows else ""


def _decay(found: list[Found]) -> str:
    """What weight decay before clipping costs: both in one process, a step of each in turn, in several processes."""
    races = sorted((f for f in found if f["kind"] == "decay"), key=lambda f: list(NETWORKS).index(f["network"]))
    rows = [
        [NETWORKS[f["network"]].title, _with_quartiles(f["contestants"]["tacit-decay"]["to_first"], places=3)]
        for f in races
        if "to_first" in f["contestants"].get("tacit-decay", {})
    ]
    title = (
        "With weight decay before clipping, of all parameters, batch 128. Steps with and without take turns in one process, and "
        "each two are compared with the two beside them; the median of these ratios in each of several processes:\n\n"
    )
    return title + _table(["", "a step, to one without"], rows) if rows else ""


def _epochs(found: list[Found]) -> str:
    parts = []
    for f in (f for f in found if f["kind"] == "epoch"):
        rows = [
            [
                _title(key),
                f"{statistics.median(_times(c)) / 1000:.2f}",
                _ratio(f, key, "plain-nhwc"),
                _ratio(f, key, "tacit"),
            ]
            for key, c in f["contestants"].items()
            if _times(c)
        ]
        title = f"{NETWORKS[f['network']].title}, {f['examples']:,} examples, batch {f['batch']}:"
        parts.append(title + "\n\n" + _table(["", "seconds", "to non-private", "to tacit"], rows))
    return "## An epoch, with each library's own sampling\n\n" + "\n\n".join(parts) if parts else ""


def _absent(found: list[Found]) -> str:
    """Whoever could not take part, and why; and ways of running that were tried and not taken for more than speed."""
    lines: dict[str, list[str]] = {}
    for f in found:
        where = f"{NETWORKS[f['network']].title}, {f['kind']}, batch {f['batch']}"
        for key, result in f["contestants"].items():
            if "reason" in result:
                lines.setdefault(f"{CONTESTANTS[key].title.strip('*')}: {_short(result['reason'])}", []).append(where)
            for tried in result.get("also_tried", []):
                why = tried.get("reason")
                if why is None and (tried.get("error") or 0) > 1e-3:
                    why = f"the clipped sum is wrong by {tried['error']:.0%}"
                if why:
                    setting = tried.get("layout", "another layout")
                    lines.setdefault(
                        f"{CONTESTANTS[key].title.strip('*')}, {setting}, was not used: {_short(why)}", []
                    ).append(where)
    if not lines:
        return ""
    listed = "\n".join(f"- {line} ({_everywhere(places)})" for line, places in sorted(lines.items()))
    return "## What could not take part\n\n" + listed


def _everywhere(places: Sequence[str]) -> str:
    return "; ".join(places) if len(places) <= 3 else f"{places[0]}; and {len(places) - 1} more races"


def _short(reason: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"(/[\w.-]+){2,}", "<path>", reason))[:220]


def _times(result: Found) -> list[float]:
    return [] if "reason" in result else [time for time in result.get("rounds_ms", []) if time is not None]


def _fastest(found: Found) -> str | None:
    plain = {key: _times(c) for key, c in found["contestants"].items() if not c["private"] and _times(c)}
    return min(plain, key=lambda key: statistics.median(plain[key])) if plain else None


def _ratio(found: Found, key: str, to: str | None) -> str:
    """The median over rounds of this one's time to the other's in the same round, with the quartiles."""
    contestants = found["contestants"]
    if to is None or key not in contestants or not _times(contestants[key]) or not _times(contestants.get(to, {})):
        return "—"
    if key == to:
        return "1"
    pairs = zip(contestants[key]["rounds_ms"], contestants[to]["rounds_ms"])
    return _with_quartiles([own / other for own, other in pairs if own is not None and other is not None])


def _with_quartiles(ratios: Sequence[float], places: int = 2) -> str:
    show: Callable[[float], str] = lambda x: f"{x:.{places}f}" if x < 9.95 else f"{x:.1f}"  # noqa: E731
    return f"{show(_quantile(ratios, 0.5))} ({show(_quantile(ratios, 0.25))}–{show(_quantile(ratios, 0.75))})"


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _title(key: str) -> str:
    return CONTESTANTS[key].title


def _present(found: list[Found]) -> list[str]:
    return [key for key in CONTESTANTS if any(_times(f["contestants"].get(key, {})) for f in found)]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])

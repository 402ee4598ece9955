"""The loss benchmark's record as a table, with a legend."""

from collections.abc import Callable
from typing import Any

from clipscale.bench.figures import processor
from clipscale.bench.sheet import Sheet, grouped
from clipscale.units import format_count

Row = dict[str, Any]

MIB = 2**20
COLUMNS: dict[str, Callable[[Row], str]] = {
    "N": lambda row: format_count(row["n"]),
    "D": lambda row: str(row["d"]),
    "dtype": lambda row: row["dtype"],
    "method": lambda row: row["method"],
    "forward ms": lambda row: _ms(row["forward_s"]["median"]),
    "backward ms": lambda row: _ms(row["backward_s"]["median"]),
    "total ms": lambda row: _ms(row["total_s"]["median"]),
    "min-max": lambda row: f"{_ms(row['total_s']['min'])}-{_ms(row['total_s']['max'])}",
    "TFLOP/s": lambda row: f"{row['flops_per_s'] / 1e12:.3g}",
    "of GEMM": lambda row: f"{100 * row['gemm_fraction']:.0f} %",
    "units": lambda row: "-" if row["units"] is None else f"{row['units']:.2f}",
    "extra MiB": lambda row: f"{row['extra_bytes'] / MIB:,.1f}",
    "error": lambda row: "-" if row["error"] is None else f"{row['error']:.1e}",
}
"""Head -> what stands in the column."""
RANKS: dict[str, Callable[[Row], str]] = {
    "sent MiB": lambda row: "-" if row["sent_bytes"] is None else f"{row['sent_bytes'] / MIB:,.2f}",
    "per B*D": lambda row: "-" if row["sent_per_feature"] is None else f"{row['sent_per_feature']:.2f}",
}
"""More columns where there are several ranks."""
CASE = ("N", "D", "dtype", "method")


def table(record: dict[str, Any]) -> Sheet:
    """One line for each row; for a method that gave no figures, why."""
    ranks = record["settings"]["ranks"]
    columns = COLUMNS | (RANKS if ranks > 1 else {})

    def cells(row: Row) -> list[str]:
        if row["status"] == "ok":
            return [cell(row) for cell in columns.values()]
        return [*(columns[head](row) for head in CASE), row["status"]]

    where = processor(record["machine"], record["rows"][0]["device"]) + (f", {ranks} ranks" if ranks > 1 else "")
    groups = [[cells(row) for row in group] for group in grouped(record["rows"], "n", "d", "dtype")]
    return Sheet(f"contrastive loss, forward and backward, on {where}", list(columns), ("method",), groups)


def legend(record: dict[str, Any]) -> list[str]:
    """What the table does not say for itself: the methods, why some have no figures, and the GEMM rates."""
    lines = [f"{name}: {about}" for name, about in record["methods"].items()]
    reasons = {
        (row["method"], row["status"], row["reason"]): row["n"] for row in reversed(record["rows"]) if "reason" in row
    }
    lines += [
        f"{method}: {status} (first at N = {format_count(n)}): {reason}"
        for (method, status, reason), n in reversed(reasons.items())
    ]
    bursts: dict[str, list[Row]] = {}
    for gemm in record["gemm"]:
        bursts.setdefault(f"{gemm['dtype']} GEMM of side {gemm['side']}", []).append(gemm)
        if "panel" in gemm:
            rows, d = gemm["panel"]["rows"], gemm["d"]
            panel = gemm["panel"] | {"products": gemm.get("products", 1)}
            bursts.setdefault(f"{gemm['dtype']} GEMM of ({rows}, {d}) by ({d}, {rows})", []).append(panel)
    for name, found in bursts.items():
        speeds = [gemm["flops_per_s"] / 1e12 for gemm in found]
        seconds = [s for gemm in found for s in gemm["seconds"]]
        products = "/".join(map(str, sorted({gemm.get("products", 1) for gemm in found})))
        lines.append(
            f"{name}: {min(speeds):.3g} to {max(speeds):.3g} TFLOP/s by case, medians of bursts of {products} back to back "
            f"({_ms(min(seconds))} to {_ms(max(seconds))} ms a burst)"
        )
    for row in record["rows"]:
        if "profile" in row:
            kinds = ", ".join(f"{name} {share:.0%}" for name, share in row["profile"]["kinds"].items())
            where = f"{row['method']} at N = {format_count(row['n'])}, D = {row['d']}, {row['dtype']}"
            lines.append(f"{where}: {kinds}{limits(row)}")
    lines.append(
        "TFLOP/s credits every method with 4 units of 2*N*N*D FLOP; units: the matmuls it really did, all ranks together."
    )
    lines.append(
        "Extra: peak memory beyond features and their gradients, of one rank. Error: largest relative distance of value and"
    )
    lines.append("gradients from float64. How each is measured stands in the JSON.")
    return lines


def limits(row: Row) -> str:
    """How near to the GEMM rate each half of our kernels' work comes, and what the device idled: what there is to be gained where.

    Of the four units, two are in the score kernels (forward, and again backward) and two in the library's products (two gradients).
    """
    profile = row["profile"]
    if "score kernels" not in profile["kinds"] or "gemm_fraction" not in row:
        return ""
    rate = row["flops_per_s"] / row["gemm_fraction"]
    halves = [
        f"{name} at {row['counted_flops'] / 2 / (share * profile['total_s']) / rate:.0%}"
        for name in ("score kernels", "matrix products")
        if (share := profile["kinds"].get(name))
    ]
    return f"; {', '.join(halves)} of the GEMM rate; idle {1e3 * profile.get('idle_s', 0.0):.2g} ms"


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"

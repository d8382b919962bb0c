"""Renders the chart for the values beside it, by Helm itself: what deploy/helm/rendered has.

    python deploy/render.py            # write
    python deploy/render.py --check    # say whether what is there is what Helm makes

Helm comes as the library of the package helm-python-sdk (the extra `charts`), which brings Helm's
own engine. Each file says of which chart and values it was made, so that a test without Helm sees
whether it is old.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent / "helm"
CHART = HERE / "kvcast"
RELEASE, NAMESPACE = "pool", "inference"


def stamp(values: Path) -> str:
    """A digest of the chart and of one file of values."""
    digest = hashlib.sha256()
    for path in [*sorted(p for p in CHART.rglob("*") if p.is_file()), values]:
        digest.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def rendered(values: Path) -> str:
    """What Helm makes of the chart with these values."""
    import helm_python
    import yaml

    with helm_python.Chart.load(str(CHART)) as chart:
        given = yaml.safe_load(values.read_text())
        chart.validate_schema(given)
        files = chart.render(given, name=RELEASE, namespace=NAMESPACE)
    parts = [
        f"# Source: {name}\n{text.strip()}\n"
        for name, text in sorted(files.items())
        if name.endswith(".yaml") and text.strip()
    ]
    head = f"# Made by deploy/render.py with Helm {helm_python.helm_sdk_version()}; do not edit.\n"
    return head + f"# of: {stamp(values)}\n" + "---\n".join(parts)


def main() -> int:
    wrong = 0
    for values in sorted((HERE / "values").glob("*.yaml")):
        path = HERE / "rendered" / values.name
        text = rendered(values)
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text() != text:
                print(f"{path} is not what Helm makes; run {Path(__file__).name}")
                wrong = 1
        else:
            path.write_text(text)
    return wrong


if __name__ == "__main__":
    sys.exit(main())

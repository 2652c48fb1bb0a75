#!/usr/bin/env python3
"""Makes docs/pictures/report-*.png: what a browser shows of the pages that the first block of docs/reports.md writes.

usage: report_pictures.py        needs chromium, pngquant, and `whale` on the PATH; measures a run, so that no two pictures are the same"""
import pathlib
import re
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURES = {"mixed": ("mixed.html", "light", 1100, 930), "measured": ("measured.html", "dark", 1100, 730)}


def main() -> None:
    commands = re.search(r"```sh\n(.*?)```", (ROOT / "docs/reports.md").read_text(), re.S).group(1)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for name, (page, scheme, width, height) in PICTURES.items():
            target = ROOT / "docs/pictures" / f"report-{name}.png"
            subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
                            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", f"--window-size={width},{height}", "--virtual-time-budget=3000",
                            f"--screenshot={folder}/{name}.png", f"file://{folder}/{page}"], check=True, stderr=subprocess.DEVNULL)
            subprocess.run(["pngquant", "--force", "--strip", "--speed", "1", "--output", str(target), "64", f"{folder}/{name}.png"], check=True)
            print(f"wrote {target.relative_to(ROOT)}, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()

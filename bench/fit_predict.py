"""What `rebatch fit` says of the trainings of fit_models.py, without a GPU; and how long
it takes. Its rows have the names of those of fit_truth.py, which can begin at their sizes
(--start), and fit_compare.py compares both.

    python3 bench/fit_predict.py --gpu h100 --output fit.json
    python3 bench/fit_predict.py --models held-out --ways native --jobs 8 --output held-out.json"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time

import fit_models

GIB = 1 << 30
HERE = pathlib.Path(__file__).resolve().parent


def predict(name, way, given):
    """The rows of a model, one for each cap."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "rebatch.fit", "--json", "--gpu", given.gpu]
    command += ["--memory", ",".join(str(int(float(cap) * GIB)) for cap in given.caps.split(","))]
    command += ["--install"] if way == "install" else []
    command += ["--", sys.executable, str(HERE / "fit_models.py"), name]
    done = subprocess.run(command, capture_output=True, text=True)
    whole = time.perf_counter() - began
    try:
        rows = json.loads(done.stdout)["rows"]
    except ValueError:
        said = " | ".join(done.stderr.strip().splitlines()[-3:])
        return [{"model": name, "way": way, "error": said or f"status {done.returncode}"}]
    return [
        {
            "model": name,
            "way": way,
            "cap_bytes": row["memory_bytes"],
            "size": row["micro"],
            "fails": row["next"],
            "peak_allocated": row["peak_allocated_bytes"],
            "peak_reserved": row["peak_reserved_bytes"],
            "outside_bytes": row["outside_bytes"],
            "seconds": row["seconds"] / len(rows),
            "start_seconds": whole - row["seconds"],
            "held_bytes": row["held_bytes"],
        }
        for row in rows
    ]


def chosen(text):
    groups = {
        "tried": [name for name in fit_models.MODELS if name not in fit_models.HELD_OUT],
        "held-out": fit_models.HELD_OUT,
        "all": list(fit_models.MODELS),
    }
    return groups.get(text) or text.split(",")


def main():
    parser = argparse.ArgumentParser(description="What rebatch fit says of fit_models.py.")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--models", type=chosen, default="tried", help="a,b, held-out or all")
    parser.add_argument("--ways", default="native,install")
    parser.add_argument("--caps", default="4,8,16", help="in GiB")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--output", default="fit.json")
    given = parser.parse_args()
    rows = []
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        jobs = [
            pool.submit(predict, name, way, given)
            for way in given.ways.split(",")
            for name in given.models
        ]
        for job in concurrent.futures.as_completed(jobs):
            found = job.result()
            rows += found
            said = " ".join(str(row.get("size", row.get("error"))) for row in found)
            print(f"{found[0]['model']} {found[0]['way']}: {said}", flush=True)
            pathlib.Path(given.output).write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()

"""GuideLLM: a short benchmark with synthetic data."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import MODEL, ROOT_URL, expect, feature, run


@feature("load")
def load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = {
            "--backend": f"kind=openai_http,target={ROOT_URL},model={MODEL}",
            "--tokenizer": f"kind=huggingface_auto,model={os.environ['CLIENTS_TOKENIZER']}",
            "--profile": "kind=synchronous",
            "--constraint": "kind=max_requests,count=5",
            "--data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "--output": f"kind=json,path={report}",
        }
        guidellm = str(Path(sys.executable).with_name("guidellm"))
        command = [guidellm, "run", "--disable-console", *(part for flag in flags.items() for part in flag)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        expect(done.returncode == 0, (done.stdout + done.stderr)[-500:])
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        expect(totals["successful"] == 5 and not totals["errored"], totals)


run()

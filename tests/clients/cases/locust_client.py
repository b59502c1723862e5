"""Locust: some users that chat."""

import subprocess
import sys
import tempfile
from pathlib import Path

from harness import MODEL, ROOT_URL, expect, feature, run

USERS = f'''
from locust import HttpUser, task

class Chat(HttpUser):
    @task
    def chat(self):
        body = {{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 4}}
        self.client.post("/v1/chat/completions", json=body)
'''


@feature("load")
def load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "users.py"
        path.write_text(USERS)
        command = [sys.executable, "-m", "locust", "-f", str(path), "--headless", "-u", "8", "-r", "8", "-t", "8s"]
        command += ["--host", ROOT_URL, "--only-summary", "--exit-code-on-error", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        expect(done.returncode == 0, (done.stdout + done.stderr)[-500:])


run()

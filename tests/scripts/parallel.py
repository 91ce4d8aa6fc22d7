"""Run several commands at once, given as JSON [{"words": [...], "env": {...}}, ...]; fails if one of them does."""

import json
import os
import subprocess
import sys

if __name__ == "__main__":
    jobs = json.loads(sys.argv[1])
    processes = [subprocess.Popen([sys.executable, *job["words"]], env=os.environ | job["env"]) for job in jobs]
    sys.exit(max(abs(process.wait()) for process in processes))

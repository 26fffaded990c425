"""Make `models/demo` again from scratch: train, export, evaluate. `make demo-model` runs this.

An interrupted run resumes from its last checkpoint. Arguments go to the training, for example `--steps 9000`;
`--help` shows them.
"""

import subprocess
import sys

STAGES = ("train", "export", "evaluate")


def main() -> None:
    """Run the stages one after another."""
    for stage in STAGES:
        arguments = sys.argv[1:] if stage == "train" else []
        done = subprocess.run([sys.executable, "-m", f"tools.demo_model.{stage}", *arguments], check=False)
        if done.returncode or {"-h", "--help"} & set(arguments):
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()

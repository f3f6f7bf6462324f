"""`python -m inlay`, and so `torchrun … -m inlay train …`."""

from inlay.cli import main

if __name__ == "__main__":
    main()

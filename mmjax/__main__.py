"""`python -m mmjax`: the same as the command `mmjax`."""

from mmjax.cli.main import run

if __name__ == "__main__":
    run()

"""``python -m trakdask``, which is the command ``trakdask``."""

from trakdask.command_line.commands import app

if __name__ == "__main__":
    app(prog_name="trakdask")

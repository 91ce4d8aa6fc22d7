"""What an interactive session may do; sys.ps1 is what tells one, to Lightning as to everyone."""

import sys

sys.ps1 = ">>> "

from launchers import fit, trainer  # noqa: E402 - Lightning looks when it is imported
from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402

from lightning_g2.errors import ConfigurationError  # noqa: E402

if __name__ == "__main__":
    for strategy in ("g2async", "g2async_spawn"):
        try:
            trainer(strategy)
        except MisconfigurationException as error:
            print(error)
    for strategy, devices in (("g2async_fork", 2), ("g2async", 1)):
        fit(f"{sys.argv[1]}/{strategy}", strategy, devices=devices)
    try:
        fit(sys.argv[1], "g2async_fork")
    except ConfigurationError as error:
        print(error)

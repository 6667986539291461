# SPDX-License-Identifier: Apache-2.0
"""`python -m reconciler`: the command line, where its script is not on the PATH."""

from __future__ import annotations

from reconciler.cli import main

if __name__ == "__main__":
    main()

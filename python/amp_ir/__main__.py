# SPDX-License-Identifier: Apache-2.0
"""`python -m amp_ir` is the `amp-ir` command."""

import sys

from amp_ir.cli import main

if __name__ == "__main__":
    sys.exit(main())

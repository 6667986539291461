# SPDX-License-Identifier: Apache-2.0
"""What a schema distributed with Citus needs said in another form. Nothing else has to know."""

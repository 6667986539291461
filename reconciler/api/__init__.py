# SPDX-License-Identifier: Apache-2.0
"""`/v1/sends`: the ledger over HTTP, for senders in any language."""

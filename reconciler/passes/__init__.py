# SPDX-License-Identifier: Apache-2.0
"""A pass over what is undecided: evidence first, then what each row is worth by the rule, then the ledger.

With what passes keep to: holds on feeds, a restored database, answers of providers that were asked, a person's word.
"""

# SPDX-License-Identifier: Apache-2.0
"""Many sends through the real ledger on a real PostgreSQL, with faults of every kind, and the laws held against them.

`world`, `course` and `outlook` are pure: what is sent when, and what becomes of it. `clock` gives the database a clock
that is moved by hand. `truth` keeps, beside the product's tables, what only the provider and we know. `senders`,
`feeds`, `application`, `passes` and `operators` are the parties, who use the product's own functions; `life` lets time
go by, and `audit` compares what was believed with the truth.
"""

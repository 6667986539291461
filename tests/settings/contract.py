# SPDX-License-Identifier: Apache-2.0
"""A settings file that uses every name of the contract."""

from __future__ import annotations

CONTRACT = """
[database]
url = "postgresql://app@db/mail"
data_dir = "/var/lib/esp-reconciler"
[receiver]
host = "0.0.0.0"
port = 8081
public_url = "https://hooks.example.com/"
max_body = "25MB"
[feeds.sendgrid-main]
provider = "sendgrid"
secrets = ["one", "two"]
tolerance = "off"
signed_url = "https://other.example.com/hook/"
grace = "30m"
[feeds.ses-eu]
provider = "ses"
topics = ["arn:aws:sns:eu-west-1:000000000000:ses-events"]
certificates = "dir"
[feeds.ses-queue]
provider = "ses"
queue_url = "https://sqs.eu-west-1.example.com/000000000000/q"
endpoint_url = "http://127.0.0.1:4566"
[rules]
grace = "10m"
give_up_after = "12h"
max_risk = 0.02
max_attempts = 4
submit_within = "50s"
same_key_retry = false
retry_backoff = "20s"
late_window = "6d"
[classes.marketing]
on_unknown = "release"
[reconcile]
every = "20s"
[log]
format = "json"
level = "warning"
"""

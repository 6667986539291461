# SPDX-License-Identifier: Apache-2.0
"""Replies of the providers' APIs to submissions, and what each proves: by hand, from the providers' documents."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from webhooks.reply import Reply

ADDRESS = "ana.reyes@example.com"
PROSE = f"Sorry, {ADDRESS}, this is what went wrong"
A, B = "7c1f0a52-3d0b-4e8e-9a57-b1c64d20e9f3", "1e77d3b9-80c2-4f3a-8f6e-0d9a5bb2c417"


class Row(NamedTuple):
    status: int
    body: Any
    """JSON, or the bytes themselves."""
    replies: list[Reply]
    headers: Mapping[str, str] = {}


def accepted(reason: str, *ids: str | None) -> list[Reply]:
    return [Reply("accepted", reason, message_id) for message_id in ids or (None,)]


def rejected(reason: str) -> list[Reply]:
    return [Reply("rejected", reason)]


def not_sent(reason: str) -> list[Reply]:
    return [Reply("not_sent", reason)]


def ambiguous(reason: str) -> list[Reply]:
    return [Reply("ambiguous", reason)]


def fault(code: object) -> dict[str, object]:
    return {"ErrorCode": code, "Message": PROSE}


def mailjet_error(code: str, status: int) -> dict[str, object]:
    error = {"ErrorIdentifier": A, "ErrorCode": code, "StatusCode": status, "ErrorMessage": PROSE}
    return {"Status": "error", "Errors": [error]}


def mailjet_sent(message_id: object) -> dict[str, object]:
    return {"Status": "success", "To": [{"Email": ADDRESS, "MessageUUID": B, "MessageID": message_id}]}


def mandrill_error(name: str) -> dict[str, object]:
    return {"status": "error", "code": -1, "name": name, "message": PROSE}


def mandrill(status: str, message_id: str, reject_reason: str | None = None) -> dict[str, object]:
    return {"email": ADDRESS, "status": status, "_id": message_id, "reject_reason": reject_reason}


def postal(status: str, **data: object) -> dict[str, object]:
    return {"status": status, "time": 0.1, "flags": {}, "data": data}


def sparkpost(code: str) -> dict[str, object]:
    return {"errors": [{"message": PROSE, "code": code}]}


def sparkpost_sent(taken: int, refused: int) -> dict[str, object]:
    return {"results": {"total_accepted_recipients": taken, "total_rejected_recipients": refused, "id": "72088119"}}


def ses_v1(code: str) -> bytes:
    return f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code></Error></ErrorResponse>".encode()


def smtp2go(succeeded: int, failed: int) -> dict[str, object]:
    return {"data": {"succeeded": succeeded, "failed": failed, "failures": [PROSE], "email_id": "1rT9Xy-InV0-4k"}}


HTML = b"<html><body>Bad Gateway</body></html>"

ROWS: Mapping[str, Mapping[str, Row]] = {
    "ses": {
        "sent": Row(200, {"MessageId": "0100-a-000000"}, accepted("HTTP 200", "0100-a-000000")),
        "bulk": Row(
            200,
            {
                "BulkEmailEntryResults": [
                    {"Status": "SUCCESS", "MessageId": "0100-a-000000"},
                    {"Status": "MESSAGE_REJECTED", "Error": PROSE},
                    {"Status": "ACCOUNT_THROTTLED", "Error": PROSE},
                    {"Status": "TRANSIENT_FAILURE", "Error": PROSE},
                    {"Status": "FAILED", "Error": PROSE},
                    {"Status": "SOMETHING_NEW", "Error": PROSE},
                ]
            },
            [
                *accepted("HTTP 200", "0100-a-000000"),
                *rejected("MESSAGE_REJECTED"),
                *not_sent("ACCOUNT_THROTTLED"),
                *not_sent("TRANSIENT_FAILURE"),
                *ambiguous("FAILED"),
                *ambiguous("HTTP 200 unclear"),
            ],
        ),
        "content": Row(
            400, {"message": PROSE}, rejected("MessageRejected"), {"x-amzn-errortype": "MessageRejected:http://a.b/"}
        ),
        "paused": Row(
            400, {"message": PROSE}, not_sent("SendingPausedException"), {"x-amzn-errortype": "SendingPausedException"}
        ),
        "suspended": Row(
            400, {"__type": "com.amazonaws.ses.v2#AccountSuspendedException"}, not_sent("AccountSuspendedException")
        ),
        "throttled": Row(429, {"message": PROSE}, not_sent("HTTP 429")),
        "unknown error": Row(400, {"message": PROSE}, ambiguous("HTTP 400 unclear"), {"x-amzn-errortype": PROSE}),
        "without a name": Row(400, {"message": PROSE}, ambiguous("HTTP 400 unclear")),
        "of the API v1": Row(400, ses_v1("MessageRejected"), rejected("MessageRejected")),
        "throttled by the API v1": Row(400, ses_v1("Throttling"), not_sent("Throttling")),
        "unknown to the API v1": Row(400, ses_v1("SomethingNew"), ambiguous("HTTP 400 unclear")),
        "key": Row(403, {"message": PROSE}, not_sent("HTTP 403"), {"x-amzn-errortype": "InvalidSignatureException"}),
        "fault": Row(500, {}, ambiguous("HTTP 500"), {"x-amzn-errortype": "MessageRejected"}),
        "another service's": Row(200, HTML, ambiguous("HTTP 200 unclear")),
    },
    "sendgrid": {
        "sent": Row(
            202, b"", accepted("HTTP 202", "kQ7v1ZrTS9mJ4pXcW2nLbA"), {"x-message-id": "kQ7v1ZrTS9mJ4pXcW2nLbA"}
        ),
        "without its header": Row(202, HTML, accepted("HTTP 202")),
        "sandbox": Row(
            200,
            b"",
            rejected("HTTP 200 not queued"),
            {"x-message-id": "kQ7v1ZrTS9mJ4pXcW2nLbA", "content-length": "0"},
        ),
        "sandbox, perhaps": Row(200, b"", ambiguous("HTTP 200 unclear"), {"content-length": "21"}),
        "sent by version 2": Row(200, {"message": "success"}, ambiguous("HTTP 200 unclear")),
        "bad": Row(400, {"errors": [{"message": PROSE, "field": "personalizations.0.to"}]}, rejected("HTTP 400")),
        "credits": Row(401, {"errors": [{"message": "Maximum credits exceeded"}]}, not_sent("HTTP 401")),
        "sender": Row(403, {"errors": [{"message": PROSE}]}, not_sent("HTTP 403")),
        "too large": Row(413, b"", rejected("HTTP 413")),
        "rate": Row(429, b"", not_sent("HTTP 429")),
        "fault": Row(500, b"", ambiguous("HTTP 500"), {"x-message-id": "kQ7v1ZrTS9mJ4pXcW2nLbA"}),
    },
    "mailgun": {
        "sent": Row(
            200,
            {"id": "<2026.6f@mg.example.com>", "message": "Queued."},
            accepted("HTTP 200", "2026.6f@mg.example.com"),
        ),
        "unreadable": Row(200, HTML, accepted("HTTP 200")),
        "bad": Row(400, {"message": PROSE}, rejected("HTTP 400")),
        "key": Row(401, b"Forbidden", not_sent("HTTP 401")),
        "failed": Row(402, {"message": "request failed"}, ambiguous("HTTP 402")),
        "rate": Row(429, {"message": PROSE}, not_sent("HTTP 429")),
        "fault, queued perhaps": Row(500, {"message": PROSE}, ambiguous("HTTP 500")),
    },
    "postmark": {
        "sent": Row(200, {"MessageID": A, "ErrorCode": 0, "Message": "OK"}, accepted("HTTP 200", A)),
        "late, without code": Row(200, {"MessageID": A, "Message": "Message accepted"}, accepted("HTTP 200", A)),
        "partly inactive": Row(200, {"MessageID": A, "ErrorCode": 0, "Message": PROSE}, accepted("HTTP 200", A)),
        "inactive": Row(422, fault(406), rejected("ErrorCode 406")),
        "invalid": Row(422, fault(300), rejected("ErrorCode 300")),
        "token": Row(401, fault(10), not_sent("ErrorCode 10")),
        "sender": Row(422, fault(400), not_sent("ErrorCode 400")),
        "credits": Row(422, fault(405), not_sent("ErrorCode 405")),
        "pending": Row(422, fault("412"), not_sent("ErrorCode 412")),
        "new code": Row(422, fault(9999), rejected("HTTP 422")),
        "batch": Row(
            200,
            [
                {"MessageID": A, "ErrorCode": 0, "Message": "OK", "To": ADDRESS},
                fault(406),
                fault(413),
                fault(9999),
                {"Message": PROSE},
                {"MessageID": B, "ErrorCode": 0, "Message": "OK"},
            ],
            [
                *accepted("HTTP 200", A),
                *rejected("ErrorCode 406"),
                *not_sent("ErrorCode 413"),
                *ambiguous("HTTP 200 unclear"),
                *ambiguous("HTTP 200 unclear"),
                *accepted("HTTP 200", B),
            ],
        ),
        "unreadable": Row(200, HTML, ambiguous("HTTP 200 unclear")),
        "empty batch": Row(200, [], ambiguous("HTTP 200 unclear")),
        "fault": Row(500, fault(406), ambiguous("HTTP 500")),
        "outage": Row(503, fault(100), ambiguous("HTTP 503")),
    },
    "resend": {
        "sent": Row(200, {"id": A}, accepted("HTTP 200", A)),
        "batch": Row(200, {"data": [{"id": A}, {"id": B}]}, accepted("HTTP 200", A, B)),
        "permissive batch": Row(
            200,
            {
                "data": [{"id": A}, {"id": B}],
                "errors": [{"index": 3, "message": PROSE}, {"index": 1, "message": PROSE}],
            },
            [
                *accepted("HTTP 200", A),
                *rejected("invalid in a batch"),
                *accepted("HTTP 200", B),
                *rejected("invalid in a batch"),
            ],
        ),
        "batch of nothing valid": Row(
            200, {"data": [], "errors": [{"index": 0, "message": PROSE}]}, rejected("invalid in a batch")
        ),
        "no place": Row(200, {"data": [{"id": A}], "errors": [{"message": PROSE}]}, ambiguous("HTTP 200 unclear")),
        "place beyond the end": Row(
            200, {"data": [{"id": A}], "errors": [{"index": 7, "message": PROSE}]}, ambiguous("HTTP 200 unclear")
        ),
        "same key, other payload": Row(
            409, {"name": "invalid_idempotent_request", "message": PROSE}, accepted("invalid_idempotent_request")
        ),
        "same key, in progress": Row(
            409,
            {"name": "concurrent_idempotent_requests", "message": PROSE},
            ambiguous("concurrent_idempotent_requests"),
        ),
        "malformed key": Row(400, {"name": "invalid_idempotency_key"}, rejected("invalid_idempotency_key")),
        "field": Row(422, {"name": "missing_required_field", "message": PROSE}, rejected("HTTP 422")),
        "lost": Row(422, b"", ambiguous("HTTP 422 unclear")),
        "domain": Row(403, {"name": "validation_error", "message": PROSE}, not_sent("HTTP 403")),
        "quota": Row(429, {"name": "daily_quota_exceeded", "message": PROSE}, not_sent("daily_quota_exceeded")),
        "conflict": Row(409, HTML, ambiguous("HTTP 409")),
        "fault": Row(500, {"name": "invalid_idempotent_request"}, ambiguous("HTTP 500")),
        "unreadable": Row(200, HTML, accepted("HTTP 200")),
        "an id that can't be stored": Row(200, {"id": "a\x00b\ud83d"}, accepted("HTTP 200", "a\ufffdb\ufffd")),
        "a long id": Row(200, {"id": "k" * 256}, accepted("HTTP 200", f"sha256:{sha256(b'k' * 256).hexdigest()}")),
    },
    "brevo": {
        "sent": Row(
            201,
            {"messageId": "<2026.7716@smtp-relay.mailin.fr>"},
            accepted("HTTP 201", "2026.7716@smtp-relay.mailin.fr"),
        ),
        "scheduled": Row(202, {"messageId": "<2026.7716@a.b>", "batchId": A}, accepted("HTTP 202", "2026.7716@a.b")),
        "versions": Row(201, {"messageIds": ["<1@a.b>", "<2@a.b>"]}, accepted("HTTP 201", "1@a.b", "2@a.b")),
        "same key": Row(400, {"code": "duplicate_parameter", "message": PROSE}, accepted("duplicate_parameter")),
        "same request": Row(400, {"code": "duplicate_request", "message": PROSE}, ambiguous("duplicate_request")),
        "credits": Row(400, {"code": "not_enough_credits", "message": PROSE}, not_sent("not_enough_credits")),
        "account": Row(402, {"code": "account_under_validation"}, not_sent("account_under_validation")),
        "bad": Row(400, {"code": "invalid_parameter", "message": PROSE}, rejected("HTTP 400")),
        "lost": Row(400, b"", ambiguous("HTTP 400 unclear")),
        "payment": Row(402, {"code": "something_new"}, ambiguous("HTTP 402")),
        "key": Row(401, {"code": "unauthorized", "message": PROSE}, not_sent("unauthorized")),
        "fault": Row(500, {"code": "duplicate_parameter"}, ambiguous("HTTP 500")),
        "unreadable": Row(201, HTML, accepted("HTTP 201")),
    },
    "mailjet": {
        "sent": Row(200, {"Messages": [mailjet_sent(288230412345678901)]}, accepted("HTTP 200", "288230412345678901")),
        "each for itself": Row(
            400,
            {
                "Messages": [
                    mailjet_error("mj-0013", 400),
                    mailjet_sent("288230412345678902"),
                    mailjet_error("send-0008", 403),
                    mailjet_error(PROSE, 400),
                    mailjet_error("mj-0001", 500),
                    mailjet_error("mj-0001", 200),
                    {"Status": "error"},
                    {"Status": "later"},
                ]
            },
            [
                *rejected("mj-0013"),
                *accepted("HTTP 200", "288230412345678902"),
                *not_sent("send-0008"),
                *rejected("HTTP 400"),
                *ambiguous("mj-0001"),
                *ambiguous("HTTP 400 unclear"),
                *ambiguous("HTTP 400 unclear"),
                *ambiguous("HTTP 400 unclear"),
            ],
        ),
        "sandbox, without id": Row(200, {"Messages": [{"Status": "success", "To": []}]}, accepted("HTTP 200")),
        "whole request": Row(
            400, {"ErrorCode": "mj-0002", "StatusCode": 400, "ErrorMessage": PROSE}, rejected("HTTP 400")
        ),
        "lost": Row(400, b"", ambiguous("HTTP 400 unclear")),
        "lost, and forbidden to some": Row(403, b"", ambiguous("HTTP 403 unclear")),
        "key": Row(401, {"ErrorMessage": PROSE}, not_sent("HTTP 401")),
        "fault": Row(500, {"Messages": [mailjet_sent(1)]}, ambiguous("HTTP 500")),
        "unreadable": Row(200, HTML, ambiguous("HTTP 200 unclear")),
    },
    "sparkpost": {
        "sent": Row(200, sparkpost_sent(1, 0), accepted("HTTP 200", "72088119")),
        "again": Row(200, sparkpost_sent(1, 0), accepted("HTTP 200", "72088119"), {"x-idempotent-replayed": "true"}),
        "partly": Row(200, sparkpost_sent(1, 4), accepted("HTTP 200", "72088119")),
        "nobody": Row(200, sparkpost_sent(0, 2), rejected("no recipient accepted")),
        "no counts": Row(200, {"results": {"id": "72088119"}}, ambiguous("HTTP 200 unclear")),
        "same key, other payload": Row(409, sparkpost("1600"), accepted("1600")),
        "same key, in progress": Row(409, sparkpost("1601"), ambiguous("1601")),
        "malformed key": Row(400, sparkpost("1602"), rejected("1602")),
        "limit": Row(420, sparkpost("2102"), not_sent("2102")),
        "limit, unreadable": Row(420, HTML, not_sent("HTTP 420")),
        "field": Row(422, sparkpost("1400"), rejected("HTTP 422")),
        "plan": Row(403, {"errors": []}, not_sent("HTTP 403")),
        "fault": Row(503, sparkpost("1600"), ambiguous("HTTP 503")),
        "unreadable": Row(200, HTML, ambiguous("HTTP 200 unclear")),
    },
    "mandrill": {
        "to each": Row(
            200,
            [
                mandrill("sent", "c1"),
                mandrill("queued", "c2"),
                mandrill("scheduled", "c3"),
                mandrill("rejected", "c4", "hard-bounce"),
                mandrill("rejected", "c5", PROSE),
                mandrill("invalid", "c6"),
                mandrill("something", "c7"),
            ],
            [
                *accepted("HTTP 200", "c1", "c2", "c3"),
                *rejected("rejected: hard-bounce"),
                *rejected("rejected"),
                *rejected("invalid"),
                *ambiguous("HTTP 200 unclear"),
            ],
        ),
        "key, with the status of a fault": Row(500, mandrill_error("Invalid_Key"), not_sent("Invalid_Key")),
        "bad, with the status of a fault": Row(500, mandrill_error("ValidationError"), rejected("ValidationError")),
        "payment": Row(402, mandrill_error("PaymentRequired"), not_sent("PaymentRequired")),
        "general": Row(500, mandrill_error("GeneralError"), ambiguous("HTTP 500")),
        "down": Row(503, mandrill_error("ServiceUnavailable"), ambiguous("HTTP 503")),
        "an error under 200": Row(200, mandrill_error("GeneralError"), ambiguous("HTTP 200 unclear")),
        "nobody": Row(200, [], ambiguous("HTTP 200 unclear")),
        "unreadable": Row(200, HTML, ambiguous("HTTP 200 unclear")),
    },
    "mailersend": {
        "sent": Row(202, b"", accepted("HTTP 202", "690710a8"), {"x-message-id": "690710a8"}),
        "some suppressed": Row(
            202,
            {"warnings": [{"type": "SOME_SUPPRESSED", "recipients": [{"email": ADDRESS}]}]},
            accepted("HTTP 202", "690710a8"),
            {"x-message-id": "690710a8"},
        ),
        "all suppressed": Row(
            202,
            {"message": PROSE, "warnings": [{"type": "ALL_SUPPRESSED", "recipients": [{"email": ADDRESS}]}]},
            rejected("ALL_SUPPRESSED"),
        ),
        "bulk": Row(202, {"message": PROSE, "bulk_email_id": "690710a9"}, ambiguous("HTTP 202 unclear")),
        "neither id nor warning": Row(202, b"", ambiguous("HTTP 202 unclear")),
        "field": Row(422, {"message": f"{PROSE} #MS42208", "errors": {}}, rejected("HTTP 422")),
        "without a code": Row(422, {"message": PROSE}, rejected("HTTP 422")),
        "lost": Row(422, b"", ambiguous("HTTP 422 unclear")),
        "quota": Row(422, {"message": f"{PROSE} #MS42204"}, not_sent("MS42204")),
        "domain": Row(422, {"message": f"{PROSE} (#MS42207)."}, not_sent("MS42207")),
        "key": Row(401, {"message": "Unauthenticated."}, not_sent("HTTP 401")),
        "maintenance": Row(421, b"", not_sent("HTTP 421")),
        "rate": Row(429, {"message": "Too many, #MS42903"}, not_sent("MS42903")),
        "fault": Row(500, {"message": "#MS42204"}, ambiguous("HTTP 500"), {"x-message-id": "690710a8"}),
    },
    "mailtrap": {
        "sent": Row(200, {"success": True, "message_ids": [A, B]}, accepted("HTTP 200", A)),
        "batch": Row(
            200,
            {
                "success": True,
                "responses": [
                    {"success": True, "message_ids": [A]},
                    {"success": False, "errors": [PROSE]},
                    {"success": True, "message_ids": []},
                    {"success": True, "message_ids": [B]},
                ],
            },
            [
                *accepted("HTTP 200", A),
                *rejected("success false"),
                *ambiguous("HTTP 200 unclear"),
                *accepted("HTTP 200", B),
            ],
        ),
        "bad": Row(400, {"success": False, "errors": [PROSE]}, rejected("HTTP 400")),
        "token": Row(401, {"success": False, "errors": ["Unauthorized"]}, not_sent("HTTP 401")),
        "rate": Row(429, {"success": False, "errors": [PROSE]}, not_sent("HTTP 429")),
        "fault": Row(500, {"success": True, "message_ids": [A]}, ambiguous("HTTP 500")),
        "unreadable": Row(200, HTML, ambiguous("HTTP 200 unclear")),
    },
    "scaleway": {
        "sent": Row(200, {"emails": [{"id": A, "message_id": B, "status": "new"}]}, accepted("HTTP 200", A)),
        "to two": Row(200, {"emails": [{"id": A, "mail_rcpt": ADDRESS}, {"id": B}]}, accepted("HTTP 200", A)),
        "unreadable": Row(200, HTML, accepted("HTTP 200")),
        "bad": Row(400, {"type": "invalid_arguments", "message": PROSE}, rejected("HTTP 400")),
        "permission": Row(403, {"type": "permissions_denied", "message": PROSE}, not_sent("HTTP 403")),
        "quota": Row(403, {"type": "quotas_exceeded", "message": PROSE}, not_sent("HTTP 403")),
        "fault": Row(503, {"message": PROSE}, ambiguous("HTTP 503")),
    },
    "postal": {
        "sent": Row(
            200,
            postal("success", message_id="a@rp.example.com", messages={ADDRESS: {"id": 88412, "token": "Zx9k"}}),
            accepted("HTTP 200", "88412"),
        ),
        "nobody": Row(200, postal("success", message_id=None, messages={}), ambiguous("HTTP 200 unclear")),
        "parameter": Row(200, postal("parameter-error", message=PROSE), rejected("parameter-error")),
        "content": Row(200, postal("error", code="NoContent", message=PROSE), rejected("NoContent")),
        "key": Row(
            200,
            postal("error", code="InvalidServerAPIKey", token="secret", message=PROSE),
            not_sent("InvalidServerAPIKey"),
        ),
        "suspended": Row(200, postal("error", code="ServerSuspended"), not_sent("ServerSuspended")),
        "new code": Row(200, postal("error", code="Confused", message=PROSE), ambiguous("HTTP 200 unclear")),
        "fault": Row(500, HTML, ambiguous("HTTP 500")),
        "unreadable": Row(200, HTML, ambiguous("HTTP 200 unclear")),
    },
    "smtp2go": {
        "sent": Row(200, smtp2go(1, 0), accepted("HTTP 200", "1rT9Xy-InV0-4k")),
        "partly": Row(200, smtp2go(1, 1), accepted("HTTP 200", "1rT9Xy-InV0-4k")),
        "nobody": Row(200, smtp2go(0, 1), rejected("no recipient accepted")),
        "neither": Row(200, smtp2go(0, 0), ambiguous("HTTP 200 unclear")),
        "permission": Row(
            400,
            {"data": {"error_code": "E_ApiResponseCodes.ENDPOINT_PERMISSION_DENIED", "error": PROSE}},
            not_sent("ENDPOINT_PERMISSION_DENIED"),
        ),
        "field": Row(
            400,
            {"error": PROSE, "error_code": "E_ApiResponseCodes.NON_VALIDATING_IN_PAYLOAD"},
            rejected("NON_VALIDATING_IN_PAYLOAD"),
        ),
        "anything": Row(400, {"error_code": "E_ApiResponseCodes.API_EXCEPTION"}, ambiguous("API_EXCEPTION")),
        "failed": Row(402, {"error": PROSE}, ambiguous("HTTP 402")),
        "rate": Row(429, {"error": PROSE}, not_sent("HTTP 429")),
        "fault": Row(500, smtp2go(1, 0), ambiguous("HTTP 500")),
        "unreadable": Row(200, HTML, ambiguous("HTTP 200 unclear")),
    },
    "azure_acs": {
        "sent": Row(202, {"id": A.upper(), "status": "Running"}, accepted("HTTP 202", A)),
        "by header": Row(202, b"", accepted("HTTP 202", A), {"operation-id": A.upper()}),
        "failed at once": Row(
            202, {"id": A, "status": "Failed", "error": {"message": PROSE}}, rejected("operation failed")
        ),
        "unreadable": Row(202, HTML, accepted("HTTP 202")),
        "bad": Row(400, {"error": {"code": "BadRequest", "message": PROSE}}, rejected("HTTP 400")),
        "key": Row(401, {"error": {"code": "Denied", "message": PROSE}}, not_sent("HTTP 401")),
        "in progress": Row(409, {"error": {}}, ambiguous("HTTP 409")),
        "too old": Row(412, {"error": {}}, ambiguous("HTTP 412")),
        "rate": Row(429, {"error": {"code": "TooManyRequests", "message": PROSE}}, not_sent("HTTP 429")),
        "fault": Row(500, {"id": A, "status": "Running"}, ambiguous("HTTP 500")),
    },
    "elastic_email": {
        "sent": Row(200, {"TransactionID": A, "MessageID": "InVenTed1"}, accepted("HTTP 200", "InVenTed1")),
        "by transaction": Row(200, {"TransactionID": A}, accepted("HTTP 200", A)),
        "error of version 2": Row(200, {"success": False, "error": PROSE}, ambiguous("HTTP 200 unclear")),
        "unreadable": Row(200, HTML, ambiguous("HTTP 200 unclear")),
        "bad": Row(400, {"Error": PROSE}, rejected("HTTP 400")),
        "key": Row(401, {"Error": "Access Denied."}, not_sent("HTTP 401")),
        "fault": Row(500, {"MessageID": "InVenTed1"}, ambiguous("HTTP 500")),
    },
    "customerio": {
        "sent": Row(
            200, {"delivery_id": "dlvInVenTed1", "queued_at": 1793607304}, accepted("HTTP 200", "dlvInVenTed1")
        ),
        "unreadable": Row(200, HTML, accepted("HTTP 200")),
        "bad": Row(400, {"meta": {"error": PROSE}}, rejected("HTTP 400")),
        "key": Row(401, {"meta": {"error": PROSE}}, not_sent("HTTP 401")),
        "rate": Row(429, {"meta": {"error": PROSE}}, not_sent("HTTP 429")),
        "fault": Row(504, HTML, ambiguous("HTTP 504")),
    },
    "loops": {
        "sent": Row(200, {"success": True}, accepted("HTTP 200")),
        "same key": Row(409, {"success": False, "message": PROSE}, accepted("HTTP 409 key used")),
        "a conflict that is not Loops's": Row(409, HTML, ambiguous("HTTP 409")),
        "no success": Row(200, {"success": False, "message": PROSE}, ambiguous("HTTP 200 unclear")),
        "unreadable": Row(200, HTML, accepted("HTTP 200")),
        "bad": Row(400, {"success": False, "path": "email", "message": PROSE}, rejected("HTTP 400")),
        "no such template": Row(404, {"success": False, "message": PROSE}, not_sent("HTTP 404")),
        "rate": Row(429, {"success": False, "message": PROSE}, not_sent("HTTP 429")),
        "fault": Row(500, {"success": False}, ambiguous("HTTP 500")),
    },
}

SENT: Mapping[str, tuple[str, int]] = {
    "azure_acs": ("api_send_accepted", 202),
    "brevo": ("api_send_ok", 201),
    "customerio": ("api_send_ok", 200),
    "elastic_email": ("api_send_ok", 200),
    "mailersend": ("api_send_headers", 202),
    "mailgun": ("api_messages_response", 200),
    "mailjet": ("api_send_ok", 200),
    "mailtrap": ("api_send_ok", 200),
    "mandrill": ("api_send_ok", 200),
    "postal": ("api_send_ok", 200),
    "postmark": ("api_email_ok", 200),
    "resend": ("api_send_ok", 200),
    "scaleway": ("api_send_ok", 200),
    "sendgrid": ("api_mail_send_response_headers", 202),
    "ses": ("api_send_email_response", 200),
    "smtp2go": ("api_send_ok", 200),
    "sparkpost": ("api_transmission_ok", 200),
}
"""The fixture that answers the send which the webhooks among the fixtures are about, and its status."""

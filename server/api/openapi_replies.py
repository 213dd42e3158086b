"""Replies in JSON Schema: members that every client may count on; more may stand beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from engine.messages import PROPOSERS, Mode, Reason
from server.api.openapi_terms import (
    ANY_OBJECT,
    BOOLEAN,
    COUNT,
    INTEGER,
    NUMBER,
    STRING,
    Schema,
    any_of,
    array,
    closed,
    enum,
    mapping,
    or_null,
    record,
)


def _by_proposer(each: Schema) -> Schema:
    return mapping(record(each), most=len(PROPOSERS), names=enum(*PROPOSERS))


ERROR = closed(
    {
        "error": closed(
            {
                "message": STRING,
                "type": enum("invalid_request_error", "rate_limit_error", "server_error"),
                "param": or_null(STRING),
                "code": or_null(STRING),
            }
        )
    }
)
GUESSES = record(
    {
        "enabled": BOOLEAN,
        "proposed": COUNT,
        "accepted": COUNT,
        "rounds": COUNT,
        "by_proposer": _by_proposer({"proposed": COUNT, "accepted": COUNT}),
    },
    max_draft=any_of(COUNT, enum("auto")),
    proposers=array(STRING),
)
USAGE = record(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": record({"cached_tokens": COUNT}),
        "completion_tokens_details": record(
            {"accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT}
        ),
        "speculation": GUESSES,
    }
)
RESPONSE_USAGE = record(
    {"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT, "speculation": GUESSES}
)
TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": array(COUNT)}
CHAT_LOGPROBS = record(
    {"content": or_null(array(record({**TOKEN, "top_logprobs": array(record(TOKEN))})))}
)
LOGPROBS = record(
    {
        "tokens": array(STRING),
        "token_logprobs": array(or_null(NUMBER)),
        "top_logprobs": array(or_null({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": array(COUNT),
    }
)
PROMPT_ENTRY = record({"logprob": NUMBER, "rank": COUNT, "decoded_token": STRING})
PROMPT_LOGPROBS = array(or_null({"type": "object", "additionalProperties": PROMPT_ENTRY}))
IDS = {"token_ids": array(COUNT), "prompt_token_ids": array(COUNT)}
PROVENANCE = array(record({"text": STRING, "source": STRING}))
CALL = record(
    {
        "id": STRING,
        "type": enum("function"),
        "function": record({"name": STRING, "arguments": STRING}),
    }
)


def head(kind: str) -> dict[str, Schema]:
    return {
        "id": STRING,
        "object": enum(kind),
        "created": COUNT,
        "model": STRING,
        "system_fingerprint": STRING,
        "seed": INTEGER,
    }


COMPLETION = record(
    {
        **head("text_completion"),
        "choices": array(
            record(
                {
                    "index": COUNT,
                    "text": STRING,
                    "logprobs": or_null(LOGPROBS),
                    "finish_reason": enum("stop", "length"),
                },
                **IDS,
                prompt_logprobs=PROMPT_LOGPROBS,
                provenance=PROVENANCE,
            )
        ),
        "usage": USAGE,
    },
    service_tier=enum("default"),
)
CHAT_COMPLETION = record(
    {
        **head("chat.completion"),
        "choices": array(
            record(
                {
                    "index": COUNT,
                    "message": record(
                        {
                            "role": enum("assistant"),
                            "content": or_null(STRING),
                            "refusal": or_null(STRING),
                        },
                        tool_calls=array(CALL),
                    ),
                    "logprobs": or_null(CHAT_LOGPROBS),
                    "finish_reason": enum("stop", "length", "tool_calls"),
                },
                token_ids=IDS["token_ids"],
                provenance=PROVENANCE,
            )
        ),
        "usage": USAGE,
    },
    prompt_token_ids=IDS["prompt_token_ids"],
    prompt_logprobs=PROMPT_LOGPROBS,
    service_tier=enum("default"),
)
RESPONSE = record(
    {
        "id": STRING,
        "object": enum("response"),
        "created_at": COUNT,
        "model": STRING,
        "status": enum("completed", "incomplete"),
        "output": array(
            any_of(
                record({"id": STRING, "type": enum("message"), "content": array(ANY_OBJECT)}),
                record({"type": enum("function_call"), "name": STRING, "arguments": STRING}),
            )
        ),
        "usage": RESPONSE_USAGE,
        "store": enum(False),
    }
)
MODEL = record(
    {
        "id": STRING,
        "object": enum("model"),
        "created": COUNT,
        "owned_by": STRING,
        "max_model_len": or_null(COUNT),
    }
)
STATE = {"engine": STRING}

REPLIES: Mapping[str, Schema] = {
    "Error": ERROR,
    "Completion": COMPLETION,
    "ChatCompletion": CHAT_COMPLETION,
    "Response": RESPONSE,
    "InputTokens": record({"object": enum("response.input_tokens"), "input_tokens": COUNT}),
    "Tokens": record(
        {"count": COUNT, "max_model_len": COUNT, "tokens": array(COUNT)},
        token_strs=or_null(array(STRING)),
    ),
    "Text": record({"prompt": STRING}),
    "Model": MODEL,
    "Models": record({"object": enum("list"), "data": array(MODEL, least=1)}),
    "Capabilities": record(
        {"object": enum("capabilities"), "limits": ANY_OBJECT, "endpoints": ANY_OBJECT}
    ),
    "Speculation": record(
        {
            "object": enum("speculation"),
            "mode": enum(*get_args(Mode)),
            "controller": STRING,
            "proposer": STRING,
            "k_max": COUNT,
            "k": COUNT,
            "reason": or_null(enum(*get_args(Reason))),
            "explanation": STRING,
            "num_sequences": COUNT,
            "speedup": or_null(NUMBER),
            "tokens_per_round": or_null(NUMBER),
            "by_proposer": _by_proposer({"proposed": NUMBER, "accepted": NUMBER, "share": NUMBER}),
            "acceptance": or_null(NUMBER),
            "kept": array(or_null(NUMBER)),
            "survival": array(or_null(NUMBER)),
            "tokens_per_second": array(or_null(NUMBER)),
            "expected_speedup": or_null(NUMBER),
            "regret": or_null(NUMBER),
        }
    ),
    "Health": record({"status": enum("ok", "failed"), **STATE}),
    "Readiness": record({"ready": BOOLEAN, **STATE}),
    "Version": record({"name": enum("foredraft"), "version": STRING}),
    "Document": ANY_OBJECT,
}

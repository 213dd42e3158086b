"""Upper bounds on request fields. The rows in `fields` quote them."""

from __future__ import annotations

MAX_N = 128
MAX_PROMPTS = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
MAX_LABEL_LENGTH = 512
MAX_METADATA = 16
MAX_TEMPLATE_KWARGS = 16
MAX_METADATA_KEY = 64
MAX_LENGTH_FIELD = 2**31 - 1
MAX_PRIORITY = 2**31 - 1
MAX_SECONDS = 86_400  # for `timeout`
MAX_VALUES = 2**18  # JSON values in one body, e.g. 128 prompts of 2048 token ids
MAX_TOOLS = 128
MAX_TOOL_BYTES = 64 * 1024
MAX_DESCRIPTION = 16 * 1024
MAX_CALLS = 128
MAX_CHOICES = 4096  # in structured_outputs.choice
MAX_SCHEMA_NAME = 64

"""The two files that a model folder holds about its tokenizer, as texts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TokenizerFiles:
    """`tokenizer` is the JSON of the tokenizers library; `settings` go into ``tokenizer_config.json``.

    Settings that are read: ``bos_token``, ``eos_token``, ``chat_template``, ``add_bos_token``.
    """

    tokenizer: str
    settings: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write both files."""
        (folder / "tokenizer.json").write_text(self.tokenizer, encoding="utf-8")
        settings = json.dumps(self.settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")

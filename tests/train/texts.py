"""A tokenizer of bytes, as transformers reads one from a folder: a token for each byte, and <eos>, which is token 256."""

from __future__ import annotations

from pathlib import Path

EOS = 256
CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def tokenizer(folder: Path, *, chat: bool = True, eos: bool = True) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **({"eos_token": "<eos>"} if eos else {}))
    if chat:
        fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return folder

"""
Load a model's tokenizer and chat template without a network: `python -m ... DIRECTORY`.

A process of its own, because the engine's libraries take seconds to import and read the environment at
import.  Always prints one line of JSON.
"""

import ctypes
import json
import sys

NEW_USER_AND_NETWORK = 0x50000000
"""CLONE_NEWUSER and CLONE_NEWNET of unshare(2): an empty network namespace, without privileges."""


def main(model: str) -> None:
    """Print whether the network was removed, the tokens of a message, and the problem, if any."""
    # Before the import, which starts threads: a process that has some cannot leave its user namespace.
    alone = ctypes.CDLL(None).unshare(NEW_USER_AND_NETWORK) == 0
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokens, problem = 0, ""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        tokenizer.encode("appliance")
        if tokenizer.chat_template:
            message = [{"role": "user", "content": "appliance"}]
            tokens = len(tokenizer.apply_chat_template(message, tokenize=True, return_dict=False))
    except Exception as error:  # noqa: BLE001 - libraries raise what they like, and all of it is the answer
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    sys.stdout.write(json.dumps({"alone": alone, "tokens": tokens, "problem": problem}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""Which names of options, variables and fields hold a secret: by their whole words.

`--tokenizer_name` and `--max_new_tokens` hold none, `--hub_token` does: what counts is the last
word, and the words before it. Where a name does, a value that cannot be one stays all the same.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# a name that ends so holds a secret, whatever comes before
_ALWAYS = frozenset("""
    password passwords passwd passwds passphrase passphrases passcode pwd secret secrets credential
    credentials creds cred authorization apikey apikeys accesskey secretkey privatekey jwt cookie
    cookies bearer authtoken accesstoken apitoken otp htpasswd pgpassword
""".split())  # fmt: skip
# of these the value looks like a token
_OF_TOKENS = frozenset("""
    authorization apikey apikeys accesskey secretkey privatekey jwt bearer authtoken accesstoken
    apitoken
""".split())  # fmt: skip
# so does one of these words behind none, or behind a word that is not among the harmless ones
_UNLESS = {
    "token": frozenset("""
        eos bos pad padding unk unknown cls sep mask masked image audio video vision text special
        stop start end begin beginning ending next new prev previous first last separator prompt
        per each by of to in drop decoder encoder prefix suffix bov eov boi eoi eot sot eom fim
        middle think thinking tool system user assistant added additional control class distill
        cost time latency ms number num max min avg mean total count language lang task
        blank newline space ignore target source input output register summary memory latent query
        sample generated one single multi speech object region patch word sub char byte
    """.split()),
    "auth": frozenset("no disable skip without with enable is has require required".split()),
    "pass": frozenset("""
        forward backward single one two first second multi num per full max low high band each
        every by both all extra another last next eval train warmup of in allow must skip dry
        fail any to
    """.split()),
}  # fmt: skip
# these hold one behind such words only
_ONLY_BEHIND = {
    words: frozenset(before.split())
    for words, before in (
        (frozenset({"key", "keys"}), """
            api access secret private account auth ssh encryption decryption encrypt signing sign
            license licence service wandb openai anthropic hf huggingface aws azure gcp google
            neptune comet mlflow client shared storage subscription deploy session hmac aes rsa gpg
            pgp tls ssl vault admin team org personal master login swift slack github gitlab
            ngc nvidia clearml kaggle comet sas s3 minio ec2 app application consumer webhook
        """),
        (frozenset({"tokens"}), """
            api access auth bearer refresh hub hf huggingface secret login oauth session personal
            csrf id_ registration wandb github gitlab slack bot deploy
        """),
        (frozenset({"dsn", "url", "uri"}), "webhook sentry hook"),
    )
}  # fmt: skip
_ASKS = frozenset("""
    use no skip with enable disable is has add return print show save prepend append allow require
    include exclude ignore keep drop log report check verify count
""".split())  # fmt: skip
_PLAIN = re.compile(
    r"(?i)(?:|true|false|yes|no|on|off|none|null|auto|default|\$\{?\w+\}?|<[^<>]*>|\*+|"
    # where it is, not what it holds
    r"[~./\w-]*[\w-]\.(?:json|ya?ml|toml|ini|cfg|txt|pem|key|crt|cer|p12|pfx|env|netrc))$"
)
_COUNTED = tuple([word] for word in ("token", "tokens", "auth", "key", "keys", "pass"))
_COUNT = re.compile(r"[+-]?\d{0,6}(?:\.\d{0,6})?(?:e[+-]?\d{1,3})?$")


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case, however it is written."""
    return [word.lower() for word in _WORD.findall(name)]


def holds_secret(name: str) -> bool:
    """Return whether an option, variable or field of this name holds a secret."""
    words = words_of(name)
    while words and words[-1].isdigit():
        words.pop()
    if not words:
        return False
    *before, last = words
    if last in _ALWAYS:
        return not (before and before[0] in _ASKS)
    if last in _UNLESS:
        if before and (before[0] in _ASKS - {"log"} or before[-1] in _UNLESS[last]):
            return False
        return not (before and before[-1].isdigit())
    for ends, behind in _ONLY_BEHIND.items():
        if last in ends:
            return bool(before) and (
                before[-1] in behind or "secret" in before or "password" in before
            )
    return last == "id" and bool(before) and before[-1] in ("secret", "password")


def is_always_secret(name: str) -> bool:
    """Return whether what such a name holds is a secret whatever it looks like: a password."""
    words = words_of(name)
    while words and words[-1].isdigit():
        words.pop()
    return words[-1:] == ["pass"] or (bool(words) and words[-1] in _ALWAYS - _OF_TOKENS)


def is_plain(name: str, value: str) -> bool:
    """Return whether a value cannot be a secret, though its name holds one."""
    if _PLAIN.match(value):
        return True
    is_number = _COUNT.match(value) is not None
    return is_number and words_of(name)[-1:] in _COUNTED

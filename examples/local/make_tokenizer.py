"""Makes the demo tokenizer in `tokenizer/`: a small byte-level BPE with ChatML special tokens and a chat template.

    python -m examples.local.make_tokenizer           write the files
    python -m examples.local.make_tokenizer --check   fail if the files differ from what this script makes

The training text is generated from the word lists below with a fixed seed, so that the result is the same everywhere
and nothing has to be downloaded. Loads with `transformers.AutoTokenizer.from_pretrained` on the directory.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TARGET = Path(__file__).parent / "tokenizer"
VOCABULARY = 6000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# How Qwen's tokenizers cut text before BPE: contractions, words, digits one by one, punctuation, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

COMMON = """
the of and to in is that it was for on are as with they be at this from or have by not but what all were when we
there can an your which their said if do will each about how up out them then she many some so these would other
into has more her two like him see time could no make than first been its who now people my made over did down only
way find use may water long little very after words called just where most know get through back much before go good
new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never
us left end along while might next sound below saw something thought both few those always looked show large often
together asked house do not world going want
"""

VERBS = """
accept add allow answer appear apply arrange ask avoid become begin believe bring build buy call carry catch change
check choose clean clear close collect compare complete connect consider contain continue control copy correct cost
count cover create cut decide deliver depend describe design develop discover discuss draw drive drop eat enter
expect explain fail fall feel fill finish fix follow forget form gather grow handle happen hear hold hope improve
include increase indicate join jump keep kill laugh lead learn leave lift limit listen live load lose love manage
mark match matter mean measure meet mention mind miss move need notice obtain offer open operate order pass pay
perform pick plan play point prefer prepare present prevent produce protect prove provide pull push reach receive
record reduce refer remain remember remove repeat replace reply report represent request require return run save
search seem sell send serve share sign sit solve speak spend stand start state stay stop store study suggest support
suppose talk teach test thank touch train travel treat try turn understand update visit wait walk warn wash watch
wear win wish wonder worry
"""

NOUNS = """
account action address age agent amount animal answer area army art author base bed bird block boat body book bottom
box boy branch bridge brother business cache car card case cause cell center century chance chapter child church
circle city class client cloud coast code color column common company concept context conversation copy corner
country course cup danger data deal degree detail difference direction distance doctor document dog door dream earth
edge education effect energy engine error evening event example eye face fact family farm father field figure file
fire fish floor flower food foot forest form friend front function future game garden gate girl glass gold
government group growth hand head health heart hill history hole horse hospital hour idea image industry instance
instruction interest island job key kind king kitchen knowledge lady lake land language law letter level library
life light list load market master matrix meaning memory message metal method middle minute model moment money month
moon morning mother mountain music nation nature night noise north note object ocean office oil order page paper
parent park part party path pattern peace person picture piece plane planet plant point policy power prefix
president price problem process product program project prompt quality queen question queue quiet race radio rain
range rate reason region request response result rice ring river road rock room root route router row rule safety
school science season second section sentence sequence server service session shape ship shoe shop side silver
sister size sky sleep smile snow society son song south space speed spirit spring square stage star station step
stone story stream street student subject success sugar summer sun surface system table teacher team temperature
template test theory thing thousand token tool town trade tree trouble truth type unit user valley value vector
village voice system assistant wall war weather week weight west wheel wind window winter woman wood worker
writer yard year
"""

ADJECTIVES = """
able active afraid alone ancient angry bad beautiful best better black blue bright broad brown busy certain cheap
clear clever cold common complete cool correct dark dead deep difficult direct dry early easy empty entire equal
exact famous fast final fine flat free fresh full general gentle glad gray green half happy hard heavy helpful high
honest hot huge human important independent interesting large late lazy local long loud low main modern narrow
natural necessary nice normal open orange perfect plain pleasant poor popular possible present private proper public
pure quick quiet rare ready real recent red rich round safe serious sharp short silent similar simple slow smooth
soft special square steady stiff straight strange strong sudden sure sweet tall terrible thick thin tiny true
unusual useful warm weak western white whole wide wild wise wonderful wrong yellow young
"""

NAMES = """
Paris London Rome Berlin Madrid Vienna Lisbon Athens Dublin Oslo Tokyo Cairo Lima Delhi Boston France Spain Italy
Germany England America Europe Africa Asia Anna Peter Maria John Laura David Emma Lucas January February March April
June July August September October November December Monday Tuesday Wednesday Thursday Friday Saturday Sunday Envoy
Kubernetes Python
"""

TOOL_TEXT = [
    '{"type": "function", "function": {"name": "get_weather", "description": "Get the weather of a city.", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}',
    '{"name": "search", "arguments": {"query": "the capital of France", "limit": 3}}',
    "def answer(question: str) -> str:\n    return lookup(question)\n",
    "You are a helpful assistant.\nYou may call one or more functions to assist with the user query.\n",
    "| name | value |\n| --- | --- |\n| size | 16 |\n",
    "Grüße aus Köln, à bientôt, señor. 你好，世界。 Привет! 🙂",
]

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object within " }}
    {{- "<tool_call></tool_call> tags.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content or not message.tool_calls %}
            {{- '\\n' + (message.content or '') }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def inflected(word: str) -> list[str]:
    """Common forms of a verb, good enough for a training text."""
    stem = word.removesuffix("e")
    return [word, word + "s", stem + "ed", stem + "ing", stem + "er"]


def sentences(count: int, seed: int = 7) -> Iterator[str]:
    """`count` generated lines of text; frequent words are frequent."""
    rng = random.Random(seed)
    verbs = [form for verb in VERBS.split() for form in inflected(verb)]
    nouns = [form for noun in NOUNS.split() for form in (noun, noun + "s")]
    adjectives = [form for word in ADJECTIVES.split() for form in (word, word + "ly", "un" + word, word + "ness")]
    pools = [(COMMON.split(), 9), (verbs, 4), (nouns, 6), (adjectives, 3), (NAMES.split(), 1)]
    lists = [words for words, _ in pools]
    weights = [weight for _, weight in pools]
    for number in range(count):
        words = [rng.choice(rng.choices(lists, weights)[0]) for _ in range(rng.randint(6, 18))]
        words[rng.randrange(len(words))] += ","
        if rng.random() < 0.15:
            words.insert(rng.randrange(len(words)), str(rng.randint(0, 9999)))
        line = " ".join(words)
        yield line[0].upper() + line[1:] + rng.choice([".", ".", ".", "?", "!", ":", "\n", ".\n\n"])
        if number % 40 == 0:
            yield rng.choice(TOOL_TEXT)


def make() -> dict[str, str]:
    """File name -> content. The special tokens get the highest ids, as in Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(12_000), trainer)
    tokenizer.add_special_tokens(SPECIAL)
    config = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    return {
        "tokenizer.json": tokenizer.to_str() + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "chat_template.jinja": TEMPLATE,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    files = make()
    if parser.parse_args().check:
        different = [name for name, text in files.items() if (TARGET / name).read_text(encoding="utf-8") != text]
        print("\n".join(f"{name} differs" for name in different) or "the tokenizer files are up to date")
        return 1 if different else 0
    TARGET.mkdir(exist_ok=True)
    for name, text in files.items():
        (TARGET / name).write_text(text, encoding="utf-8")
        print(f"{TARGET.name}/{name}: {len(text.encode()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

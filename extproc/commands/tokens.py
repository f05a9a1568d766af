"""`kvcar tokens`: what kvcar makes of one request."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from extproc.commands.common import CONFIG, fail, read_config

if TYPE_CHECKING:
    from extproc.config import Config, Pool
    from extproc.openai import Body
    from extproc.prompt import Prompt, Prompter
    from extproc.reasons import Unscored


@click.command()
@CONFIG
@click.option("--path", default=None, help="Request path; default: by the body, chat when it has messages.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.argument("request_file", metavar="REQUEST.json", type=click.File("rb"))
def tokens(config_path: Path, path: str | None, as_json: bool, request_file: Any) -> None:
    """Print pool, rendered text, token ids, blocks and cuts of a request, or why it would pass unscored.

    REQUEST.json holds a request body; "-" reads standard input. Exit status 1 when the request would pass unscored.
    The output holds the request's text: this command is for your own requests.
    """
    from extproc import assembly
    from extproc.config import ConfigError
    from extproc.openai import Body, parse_body
    from extproc.reasons import Reason, Unscored

    config = read_config(config_path)
    try:
        assembly.check_files(config, str(config_path))
    except ConfigError as error:
        fail(str(error))
    data = request_file.read()
    try:
        json.loads(data)
    except ValueError as error:
        fail(f"the request is no JSON ({error})")
    except RecursionError:
        fail("the request is nested too deeply")
    parsed = parse_body(path or _guess(data), {}, data, max_bytes=config.limits.max_body_bytes)
    pool = None
    if isinstance(parsed, Body):
        pool = next(
            (item for item in config.pools if parsed.model in item.models + item.adapters),
            config.pools[0] if parsed.model is None and len(config.pools) == 1 else None,
        )
    result: Any = parsed
    keys: list[bytes] = []
    cuts: tuple[str, ...] = ()
    if isinstance(parsed, Body):
        if pool is None:
            there = ", ".join(name for item in config.pools for name in item.models + item.adapters)
            result = Unscored(Reason.MODEL, f"no pool serves the model {parsed.model!r}; there are: {there}")
        else:
            result, prompter = asyncio.run(_ask(pool, config, parsed))
            cuts = prompter.delimiters
            if not isinstance(result, Unscored) and isinstance(pool.block_size, int):
                keys = prompter.keys(result, pool.block_size, pool.hash_seed)
    if isinstance(result, Unscored):
        out: dict[str, Any] = {
            "pool": pool.name if pool else None,
            "reason": str(result.reason),
            "detail": result.detail,
        }
    else:
        assert pool is not None
        size = pool.block_size if isinstance(pool.block_size, int) else None
        out = {
            "pool": pool.name,
            "reason": None,
            "model": result.model,
            "adapter": result.adapter,
            "cache_salt": result.salt is not None,
            "text": result.text,
            "ids": result.ids,
            "count": result.count,
            "truncated": result.truncated,
            "reads_cache": result.reads_cache,
            "block_size": size,
            "blocks": [key.hex() for key in keys] if size else None,
            "delimiters": list(cuts),
            "segments": [len(piece.tokens) // 4 for piece in result.pieces] if result.pieces else None,
        }
    if as_json:
        click.echo(json.dumps(out, ensure_ascii=False))
    else:
        _print(out)
    sys.exit(1 if out["reason"] else 0)


async def _ask(pool: Pool, config: Config, body: Body) -> tuple[Prompt | Unscored, Prompter]:
    """As the server does it: where nothing can be rendered or encoded here, the pool's engines are asked."""
    from extproc.assembly import prompter_options
    from extproc.prompt.prompter import Prompter
    from extproc.prompt.remote import RemoteTokenizer

    remote = None
    if pool.remote_tokenizer:
        remote = RemoteTokenizer([f"http://{one.address}" for one in pool.instances], api=pool.remote_tokenizer.api)
    prompter = Prompter.load(prompter_options(pool, config), strict=False, remote=remote)
    try:
        return await prompter.prompt_of(body), prompter
    finally:
        if remote is not None:
            await remote.close()


def _guess(data: bytes) -> str:
    """The path that goes with a body."""
    try:
        body = json.loads(data)
    except ValueError:
        return "/v1/chat/completions"
    names = body.keys() if isinstance(body, dict) else ()
    return "/v1/completions" if "prompt" in names and "messages" not in names else "/v1/chat/completions"


def _print(out: dict[str, Any]) -> None:
    if out["reason"]:
        click.echo(f"pool: {out['pool']}\nunscored: {out['reason']} {out['detail']}\nsee docs/unscored.md")
        return
    click.echo(f"pool: {out['pool']}  model: {out['model']}  adapter: {out['adapter']}  tokens: {out['count']}")
    if out["text"] is not None:
        click.echo(f"text: {out['text']!r}")
    click.echo(f"ids: {out['ids']}")
    if out["blocks"] is None:
        click.echo("blocks: the block size is auto, so it is known only once an engine has published an event")
    else:
        click.echo(f"blocks of {out['block_size']}: {len(out['blocks'])}")
        for number, key in enumerate(out["blocks"]):
            click.echo(f"  {number:4} {key}")
    cuts = ", ".join(map(repr, out["delimiters"])) or "none: the text is encoded whole"
    click.echo(f"cut before: {cuts}")
    if out["segments"]:
        click.echo(f"segments in tokens: {out['segments']}")
    if not out["reads_cache"]:
        click.echo("note: the engine does not read its prefix cache for this request, so no hit is predicted")

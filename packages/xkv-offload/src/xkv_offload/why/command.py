"""`xkv why` where an engine's package is: its options, and the order of its questions.

Owns: the command that takes the place of the core's (ADR 0012); which namespace an engine has, why its prompt misses.
Must not know: how a card is asked, how an object's history is read (`xkv_store.inquiry`).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from xkv_compat.block_hashes import SEED_VARIABLE, request_block_hashes
from xkv_compat.errors import BadInput, BrokenVLLM, UnsupportedVLLM
from xkv_compat.features import detect_live
from xkv_compat.vllm_symbols import has_default_seed, vllm_version_text
from xkv_store import commands_why
from xkv_store.commands_contents import Card
from xkv_store.commands_gateway import Json, PortOrElse, SocketDir, SocketPath, path_option
from xkv_store.commands_why import Generation, Group, Other, Ranks, WhyHash, WhyKey, WhyNamespace, inquiring, say
from xkv_store.console import Output
from xkv_store.errors import UserError
from xkv_store.explanation import Explanation, Verdict, other_identity
from xkv_store.inquiry import Inquiry
from xkv_store.sockets import default_socket_dir, socket_for_port
from xkv_store.unused_options import refuse_unused

from .. import config as keys  # noqa: TID252  the package may have another name
from ..doctor.command import RANKS_MAX, ConfigText  # noqa: TID252
from ..doctor.environment import gather_environment  # noqa: TID252
from ..doctor.transfer_config import read_transfer_config  # noqa: TID252
from .expected import Launch, compared, expected
from .prompt import Cut, cut_of, keys_of, places, read_tokens

SEEDS_TRIED = ("0", "1", "42", "random")
"""Of PYTHONHASHSEED, beside none at all: what pages and people write. Another one is named by --hash-seed."""
OTHERS_HASHED_MAX = 64  # other namespaces whose cut of the prompt is tried
UNSET = "unset"
OTHER_QUESTIONS = "--tokens, or what is known of the engine (--config, --model), or "

Tokens = Annotated[
    Optional[Path],  # noqa: UP045  typer reads this at run time, also on Python 3.10
    typer.Option("--tokens", parser=path_option("--tokens"), metavar="FILE", help="The prompt with these token ids."),
]
Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--model", metavar="NAME|PATH", help="The engine's model, as it is given to vLLM."),
]
Pid = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, help=f"Take {SEED_VARIABLE} from this process, say a running engine's."),
]


def register(app: typer.Typer) -> None:
    """Add this command: an entry point of the group `xkv_commands`."""
    app.command(name="why")(why_command)


def why_command(  # noqa: PLR0917  each parameter is an option, and typer passes them by name
    card: Card = None,
    tokens: Tokens = None,
    key: WhyKey = None,
    generation: Generation = None,
    namespace: WhyNamespace = None,
    other: Other = None,
    block_hash: WhyHash = None,
    group: Group = None,
    ranks: Ranks = None,
    config: ConfigText = None,
    model: Model = None,
    tp: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=RANKS_MAX, help="The engine's tensor parallel size."),
    ] = None,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="vLLM's --kv-cache-dtype."),
    ] = None,
    block_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=65_536, help="vLLM's --block-size."),
    ] = None,
    hash_algorithm: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="vLLM's --prefix-caching-hash-algo."),
    ] = None,
    hash_seed: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"The engine's {SEED_VARIABLE}; {UNSET} where it has none [default: this environment's]."),
    ] = None,
    salt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--salt", help="The request's cache salt."),
    ] = None,
    pid: Pid = None,
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    socket: SocketPath = None,
    as_json: Json = False,
) -> None:
    """Say why a lookup misses: of a prompt, an object, a chunk; or what makes an engine's identity another one.

    Ends with 0 where it would hit, with 1 where it misses. With --tokens run it in the engine's Python: the hashes are
    this vLLM's own.
    """
    output = Output(json=as_json)
    launch = _launch(config, model=model, tp=tp, dtype=dtype, block_size=block_size, hash_algorithm=hash_algorithm)
    is_launch = launch != Launch()
    of_object = {"generation": generation, "group": group, "ranks": ranks}
    if tokens is None and not is_launch:
        commands_why.check_question(
            key=key, block_hash=block_hash, namespace=namespace, other=other, others=OTHER_QUESTIONS, **of_object
        )
    elif key is not None or block_hash is not None or other is not None:
        raise UserError("--key, --block-hash and --other need neither tokens nor a configuration: leave these out")
    else:
        unused = {f"--{name}": value for name, value in of_object.items()}
        refuse_unused(unused, "an object or a chunk is not what is asked about")
    of_prompt = {"--hash-seed": hash_seed, "--pid": pid, "--salt": salt}
    if tokens is None:
        refuse_unused(of_prompt, "without --tokens no hash is made")
    if hash_seed is not None:
        refuse_unused({"--pid": pid}, "--hash-seed says what would be taken from it")
    ids = None if tokens is None else read_tokens(tokens)
    seed = gather_environment(pid).seed if hash_seed is None else (None if hash_seed == UNSET else hash_seed)
    gateways = _gateways(launch, card, port, socket_dir, socket)
    if ids is not None:
        # Now, since importing vLLM may take longer than a gateway bears with a tool that says nothing.
        with suppress(UserError), _asking_vllm():  # which is told where the hashes are wanted
            detect_live()
    own: bytes | None = None  # as the first gateway says it: another one may have forgotten it with its objects
    for number, place in enumerate(gateways):
        with inquiring(*place) as inquiry:
            if ids is None and not is_launch:
                found, about = commands_why.ask(
                    inquiry, key=key, generation=generation, namespace=namespace, other=other, block_hash=block_hash,
                    group=group or 0, ranks=ranks or 1,
                )  # fmt: skip
                break
            if own is None:
                own, found = engine_namespace(inquiry, launch, namespace)
                about = {} if own is None else {"namespace": own.hex()}
                identity = None if own is None else inquiry.identity_of(own)
            if own is not None and ids is not None:
                rank = number if len(gateways) > 1 else None
                prompt = Prompt(inquiry, own, identity, ids, seed=seed, salt=salt, rank=rank)
                found, more = prompt.explain()
                about |= more
        if found.misses:
            break
    raise typer.Exit(say(output, found, about))


def _gateways(
    launch: Launch, card: Path | None, port: int | None, socket_dir: Path | None, socket: Path | None
) -> list[tuple[Path | None, int | None, Path | None, Path | None]]:
    """Where to ask: the card of the options, else that of the engine's configuration, or each rank's."""
    config = launch.config
    if config is None or any(one is not None for one in (card, port, socket)):
        return [(card, port, socket_dir, socket)]
    if config.socket_dir is not None:
        refuse_unused({"--socket-dir": socket_dir}, "--config has xkv.socket_dir")
    folder = config.socket_dir or socket_dir or default_socket_dir()
    if config.path is not None:
        return [(config.path, None, folder, None)]
    assert config.port is not None, "a configuration has a port or a path"
    if config.port_per_rank and launch.ranks is None:
        raise UserError("xkv.port_per_rank: each rank has a gateway of its own; type how many there are (--tp)")
    ranks = (launch.ranks or 1) if config.port_per_rank else 1
    return [(None, None, None, socket_for_port(folder, config.port + number)) for number in range(ranks)]


def _launch(
    config: str | None,
    *,
    model: str | None,
    tp: int | None,
    dtype: str | None,
    block_size: int | None,
    hash_algorithm: str | None,
) -> Launch:
    launch = Launch(model=model, ranks=tp, cache_dtype=dtype, block_tokens=block_size, hash_algorithm=hash_algorithm)
    if config is not None:
        transfer = read_transfer_config(config)
        launch = replace(launch, extra=transfer.extra, config=keys.parse(transfer.extra))
    return launch


def engine_namespace(inquiry: Inquiry, launch: Launch, named: str | None) -> tuple[bytes | None, Explanation]:
    """The engine's namespace, None where the card knows none of its identity, and what is to be said then.

    Raises UserError where that is not determined.
    """
    if named is not None:
        own = inquiry.named("--namespace", commands_why.digits_of("--namespace", named))
        # That it is its launch's own says nothing against the launch that is meant.
        differing = [one for one in compared(_wanted(launch), inquiry.identity_of(own)) if one.path != "launch"]
        if differing:
            return None, other_identity(differing, what=f"namespace {own.hex()}")
        return own, _same(own)
    known = [(one, inquiry.identity_of(one)) for one in inquiry.namespaces]
    wanted = _wanted(launch)
    near = sorted(
        ((compared(wanted, identity), one) for one, identity in known if identity is not None),
        key=lambda pair: (len(pair[0]), pair[1]),
    )
    if not near:
        what = "no engine has published its identity on this card"
        return None, Explanation(Verdict.NOT_KNOWN, what, "nothing was ever stored by one", "start the engine once")
    fitting = [one for differing, one in near if not differing]
    if len(fitting) > 1:
        some = " and ".join(one.hex() for one in fitting[:2])
        raise UserError(
            f"{len(fitting)} namespaces fit what was said of the engine ({some}…): say more of it (--model, --tp, "
            "--dtype, --block-size), or type --namespace, which its log says at the start; "
            "`xkv why --namespace … --other …` compares them"
        )
    if not fitting:
        differing, one = near[0]
        return None, other_identity(
            differing, what=f"no namespace of the card is this engine's; the nearest, {one.hex()},"
        )
    return fitting[0], _same(fitting[0])


def _same(own: bytes) -> Explanation:
    what = f"the card knows this engine's identity, as far as it was said: namespace {own.hex()}"
    return Explanation(Verdict.HELD, what, "what it stores there it hits", "--tokens FILE, to ask about a prompt")


def _wanted(launch: Launch) -> dict[str, object]:
    """With the version of the vLLM that is installed here, where one is and something was said of the engine."""
    if launch == Launch():
        return {}
    try:
        with redirect_stdout(sys.stderr):
            version = vllm_version_text()
        return expected(replace(launch, vllm=version))
    except (UnsupportedVLLM, BrokenVLLM, BadInput):
        return expected(launch)


class Prompt:
    """One prompt, asked of one namespace."""

    def __init__(
        self,
        inquiry: Inquiry,
        own: bytes,
        identity: object,
        tokens: list[int],
        *,
        seed: str | None,
        salt: str | None,
        rank: int | None = None,
    ) -> None:
        """`identity`: what was published of `own`; `rank`: whose gateway this is, where each rank has one."""
        if identity is None:
            raise UserError(
                f"nothing was published of namespace {own.hex()} on this card, so how its engine cuts prompts is not "
                "known: ask by --key or --block-hash, or with the card of that engine"
            )
        self._inquiry = inquiry
        self._own = own
        self._tokens = tokens
        self._seed = seed
        self._salt = salt
        self._rank = rank
        self._cut = self._cut_of(identity)

    def _cut_of(self, identity: object) -> Cut:
        cut = cut_of(identity)
        return cut if self._rank is None else replace(cut, ranks=(self._rank,))

    def explain(self) -> tuple[Explanation, dict[str, Any]]:
        """Why its first chunk that is missing is, and how far it hits."""
        cut, tokens = self._cut, len(self._tokens)
        needed = places(cut, tokens)
        about: dict[str, Any] = {"tokens": tokens, "chunks": len(needed), "hash_seed": self._seed}
        if not needed:
            size = min(group.chunk_tokens for group in cut.groups)
            what = f"the prompt has {tokens} tokens, and a chunk {size}"
            return Explanation(
                Verdict.TOO_SHORT, what, "only whole chunks are stored", "a smaller blocks_per_chunk"
            ), about
        if self._seed is None and not _is_stable(cut.hash_algorithm):
            what = f"{SEED_VARIABLE} is not set, and this vLLM's root hash is then random in each process"
            remedy = f"{SEED_VARIABLE}=0, for the engine and here; --hash-seed or --pid where the engine has one"
            return Explanation(Verdict.HASH_SEED, what, "no other launch asks for the same hashes", remedy), about
        hashes = self._hashes(cut, self._seed)
        for number, place in enumerate(needed):
            answer = self._inquiry.chunk(keys_of(self._own, cut, hashes, place))
            if answer.misses:
                if answer.verdict is Verdict.NEVER_STORED and number == 0:
                    answer = self._under_another_seed(place) or self._cut_otherwise() or answer
                hit = needed[number - 1][0] if number else 0
                about |= {"hit_tokens": hit, "chunk": number, "group": place[1]}
                where = f"of the chunk up to token {place[0]} (group {place[1]}; {hit} tokens before it hit): "
                return replace(answer, what=where + answer.what), about
        about["hit_tokens"] = needed[-1][0]
        what = f"all {len(needed)} chunks of the prompt are held: {needed[-1][0]} of its {tokens} tokens"
        return Explanation(Verdict.HELD, what, "vLLM computes at least the last token anew"), about

    def _under_another_seed(self, place: tuple[int, int]) -> Explanation | None:
        """Whether the card has this chunk by the hashes of another seed."""
        others = [seed for seed in (None, *SEEDS_TRIED) if seed != self._seed]
        for seed in others:
            if seed is None and not _is_stable(self._cut.hash_algorithm):
                continue
            hashes = self._hashes(self._cut, seed)
            if not self._inquiry.chunk(keys_of(self._own, self._cut, hashes, place)).misses:
                here, there = (_seed_words(one) for one in (self._seed, seed))
                return Explanation(
                    Verdict.HASH_SEED,
                    f"it was stored by an engine with {there}, and is asked for with {here}",
                    "hashes of the same tokens are others under another seed",
                    f"the same {SEED_VARIABLE} for all engines that are to share what they store",
                )
        return None

    def _cut_otherwise(self) -> Explanation | None:
        """Whether the card has the prompt's beginning under another identity, which cuts it otherwise."""
        others = [one for one in self._inquiry.namespaces if one != self._own][:OTHERS_HASHED_MAX]
        for other in others:
            try:
                cut = self._cut_of(self._inquiry.identity_of(other))
            except UserError:
                continue
            needed = places(cut, len(self._tokens))
            if not needed or (self._seed is None and not _is_stable(cut.hash_algorithm)):
                continue
            hashes = self._hashes(cut, self._seed)
            if not self._inquiry.chunk(keys_of(other, cut, hashes, needed[0])).misses:
                answer = self._inquiry.compare(self._own, other)
                return replace(answer, what=f"the prompt is held by another engine; {answer.what}")
        return None

    def _hashes(self, cut: Cut, seed: str | None) -> list[bytes]:
        with _asking_vllm():
            return request_block_hashes(
                self._tokens,
                tokens_per_hash=cut.tokens_per_hash,
                hash_algorithm=cut.hash_algorithm,
                seed=seed,
                salt=self._salt,
            )


@contextmanager
def _asking_vllm() -> Iterator[None]:
    """UserError where the vLLM in this Python cannot be asked, for whatever reason."""
    try:
        with redirect_stdout(sys.stderr):  # importing some releases logs to stdout
            yield
    except (UnsupportedVLLM, BrokenVLLM, BadInput, ValueError) as error:
        raise UserError(
            f"the hashes of tokens are vLLM's own, and the one in this Python cannot be asked for them ({error}): run "
            "this in the engine's Python, or ask by --key or --block-hash"
        ) from error


def _is_stable(hash_algorithm: str) -> bool:
    """Whether this vLLM's hashes are alike in each process without a seed."""
    with _asking_vllm():
        return has_default_seed(detect_live(), hash_algorithm)


def _seed_words(seed: str | None) -> str:
    return f"no {SEED_VARIABLE}" if seed is None else f"{SEED_VARIABLE}={seed}"

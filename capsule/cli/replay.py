"""``capsule replay``: an animated picture of an episode, played again as it was claimed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli import options
from capsule.cli.common import guarded, print_json, use_gpu
from capsule.cli.defaults import trusted_files
from capsule.host.wording import counted


@guarded
def command(
    bundle: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="Bundle of a run by one of Capsule's trainers.")
    ],
    *,
    episode: Annotated[
        int | None,
        options.option(
            "--episode N",
            "Episode of the last evaluation, counted from 0. By default, it is the one with the "
            "highest return.",
            options.OUTPUT,
            min=0,
        ),
    ] = None,
    begin: Annotated[
        float,
        options.option(
            "--begin SECONDS",
            "Time in the episode at which the picture begins.",
            options.OUTPUT,
            min=0,
        ),
    ] = 0.0,
    seconds: Annotated[
        float | None,
        options.option(
            "--seconds SECONDS",
            "Part of the episode that the picture shows. By default, it shows all of it.",
            options.OUTPUT,
            min=0,
        ),
    ] = None,
    output: Annotated[
        Path,
        options.option(
            "--output -o FILE", "Picture to write: .gif, .png or .webp.", options.OUTPUT
        ),
    ] = Path("play.gif"),
    keys: options.KeysOption = None,
    allowed_signers: options.AllowedSignersOption = None,
    allow_untrusted: options.UntrustedOption = False,
    engine: options.EngineOption = "auto",
    gpu: options.GpuOption = None,
    base: options.BaseOption = "packages",
    code: options.CodeOption = "own",
    data: options.DataOption = None,
    as_json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Play the last evaluation again, and draw an episode.

    The picture is animated. The final network plays all episodes in the image of the run. A picture
    is only written if every return and every length is the one that the bundle claims.

    Examples:
        # Write play.gif, which shows the best episode of the evaluation.
        capsule replay run.capsule.tar

        # Show the first ten seconds of another episode.
        capsule replay run.capsule.tar --key alice.pub --episode 3 --seconds 10
    """
    from capsule.bundle.trust import load_policy
    from capsule.host.outputs import require_file, write_file
    from capsule.image.cache import Cache
    from capsule.image.data.places import parse_places
    from capsule.report.pictures import animation, check_form
    from capsule.report.progress import open_reporter
    from capsule.verification.replay import replayed
    from capsule.verification.request import Mode, VerifyRequest

    # A wrong name is found before the evaluation is played, which can take long.
    check_form(output)
    use_gpu(gpu)
    require_file(output, (bundle, *(keys or ()), *(allowed_signers or ())))
    request = VerifyRequest(
        bundle=bundle,
        trust=load_policy(*trusted_files(keys, allowed_signers, others=allow_untrusted)),
        mode=Mode("full"),
        engine=engine,
        allow_untrusted=allow_untrusted,
        base=base,
        code=code,
        data=parse_places(data or []),
    )
    with (
        open_reporter(quiet=quiet) as reporter,
        replayed(request, episode, Cache(), reporter) as replay,
    ):
        reporter.note(f"drawing {counted(replay.film.screens, 'screen')}")
        drawn = animation(replay.film, replay.screens, output.suffix, begin=begin, seconds=seconds)
    write_file(output, drawn)
    point, number = replay.film.point, replay.episode
    score, steps = float.fromhex(point.returns[number]), point.lengths[number]
    if as_json:
        facts = {"episode": number, "return": score, "steps": steps, "step": point.step}
        signer = replay.signer.key
        run = {"claim_id": replay.claim_id, "authentic": replay.authentic, "signer": signer}
        document = {"schema": "capsule/replay/v1", "file": str(output), **run, **facts}
        print_json({**document, "episodes": len(point.returns)})
        return
    typer.echo(f"claim    {replay.claim_id}")
    typer.echo(f"signer   {replay.signer}{'' if replay.authentic else ' (not trusted)'}")
    episodes = len(point.returns)
    typer.echo(f"equal    {episodes:,} of {counted(episodes, 'episode')}, as claimed")
    typer.echo(f"episode  {number}: return {score:g} in {counted(steps, 'step')}")
    typer.echo(f"picture  {output} ({len(drawn):,} bytes)")

"""A job with something else in one place: a search makes a hundred thousand, and ``dataclasses.replace`` looks at every field of each."""

from __future__ import annotations

from ullage.job.job import Data, Engine, Job, Layout, Loss, Recompute, ScheduleName


def changed(
    job: Job,
    *,
    data: Data | None = None,
    layout: Layout | None = None,
    engine: Engine | None = None,
    recompute: Recompute | None = None,
    loss: Loss | None = None,
) -> Job:
    return Job(
        model=job.model,
        cluster=job.cluster,
        data=data or job.data,
        layout=layout or job.layout,
        engine=engine or job.engine,
        precision=job.precision,
        stack=job.stack,
        stack_version=job.stack_version,
        optimizer=job.optimizer,
        grad_clip=job.grad_clip,
        recompute=recompute or job.recompute,
        attention=job.attention,
        loss=loss or job.loss,
        offload=job.offload,
        lora=job.lora,
        freeze=job.freeze,
        compile=job.compile,
        defaults=job.defaults,
        warnings=job.warnings,
    )


def pipelined(layout: Layout, *, dp: int, pp: int, vpp: int = 1, split: tuple[int, ...] | None = None) -> Layout:
    schedule: ScheduleName = "interleaved-1f1b" if vpp > 1 else "1f1b"
    return Layout(
        dp=dp,
        tp=layout.tp,
        sp=layout.sp,
        cp=layout.cp,
        cp_kind=layout.cp_kind,
        pp=pp,
        vpp=vpp,
        schedule=schedule,
        pp_split=split,
        ep=layout.ep,
        etp=layout.etp,
    )


def batched(data: Data, *, micro_batch: int | None = None, grad_accum: int | None = None) -> Data:
    return Data(
        seq_len=data.seq_len,
        micro_batch=micro_batch or data.micro_batch,
        grad_accum=grad_accum or data.grad_accum,
        padding_mask=data.padding_mask,
        seq_len_mean=data.seq_len_mean,
    )


def with_micro_batch(job: Job, micro_batch: int) -> Job:
    return changed(job, data=batched(job.data, micro_batch=micro_batch))

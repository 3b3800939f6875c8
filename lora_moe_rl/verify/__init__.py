"""`lora-moe-rl verify WHAT` shows on the user's own model that trainer, engine and files compute
one function. Each WHAT has a command line, what it runs, and what it reports:

    layout         command, layout, compare, jobs, layout_report
    refit          refit, refit_run, refit_plan, refit_jobs, refit_reference, refit_report
    replay         replay, replay_run, replay_record, replay_spread, replay_ranks, replay_reference,
                   replay_report
    async          in_flight, in_flight_run, in_flight_engine, in_flight_jobs
    base           base, base_run, base_jobs
    export         export; serve_check, a command of its own, compares what `vllm serve` says

`report` and `comparisons` are what is said, `processes`, `ranks` and `engine` who is asked.
"""

//! The `beeline` command: parse, dispatch, answer, exit code.
//!
//! A command is one file in `commands`, one variant of [`flags::Command`] and one arm in
//! [`commands::run`]. It returns an [`output::Answer`] that this file writes as text or JSON, so no
//! command prints a result by itself.
#![forbid(unsafe_code)]

mod commands;
mod failure;
mod flags;
mod output;
mod progress;
mod signal;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use commands::Context;
use failure::Failure;
use flags::Cli;

fn main() -> ExitCode {
    signal::take_file_size_limit();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return ExitCode::from(refuse_usage(&error)),
    };
    for problem in beeline::config::env_problems() {
        output::warn(&output::one_line(&problem));
    }
    let context = Context::new(cli.json);
    let code = match commands::run(&cli.command, &context) {
        Ok(answer) => output::answer(answer, &context),
        Err(failure) => output::failure(failure, &context),
    };
    ExitCode::from(code)
}

/// Help and version go to stdout, a wrong command line to stderr, or as JSON where that was asked for.
fn refuse_usage(error: &clap::Error) -> u8 {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return output::written(error.print(), failure::EXIT_DONE);
    }
    if flags::asks_for_json(std::env::args_os()) {
        return output::failure(Failure::usage(error), &Context::new(true));
    }
    let _ = error.print();
    failure::EXIT_REFUSED
}

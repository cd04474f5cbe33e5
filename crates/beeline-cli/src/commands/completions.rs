//! `beeline completions`: completions for a shell, from the flag table.

use clap::CommandFactory as _;

use crate::failure::Failure;
use crate::flags::{Cli, CompletionsFlags};
use crate::output::Answer;

/// Generates the completions.
///
/// # Errors
/// None so far.
pub(crate) fn run(flags: &CompletionsFlags) -> Result<Answer, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(flags.shell, &mut Cli::command(), "beeline", &mut script);
    let mut answer = Answer::of("completions");
    answer.text = String::from_utf8_lossy(&script).into_owned();
    answer.set("shell", flags.shell.to_string());
    answer.set("text", answer.text.clone());
    Ok(answer)
}

//! `beeline man`: one man page for the command and all its subcommands, from the flag table.

use std::io;

use clap::CommandFactory as _;
use clap_mangen::Man;

use crate::failure::Failure;
use crate::flags::{Cli, ManFlags};
use crate::output::Answer;

/// Generates the page in roff, for `man -l -`.
///
/// # Errors
/// None that is known: writing into memory does not fail.
pub(crate) fn run(_flags: &ManFlags) -> Result<Answer, Failure> {
    let page = page().map_err(|error| {
        Failure::failed("io-failed", format!("cannot generate the man page: {error}"))
    })?;
    let mut answer = Answer::of("man");
    answer.text = String::from_utf8_lossy(&page).into_owned();
    answer.set("text", answer.text.clone());
    Ok(answer)
}

fn page() -> io::Result<Vec<u8>> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let extra = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
    let subcommands: Vec<clap::Command> = command.get_subcommands().cloned().collect();
    let main = Man::new(command);
    let mut page = Vec::new();
    main.render_title(&mut page)?;
    main.render_name_section(&mut page)?;
    main.render_synopsis_section(&mut page)?;
    main.render_description_section(&mut page)?;
    main.render_options_section(&mut page)?;
    for subcommand in subcommands.into_iter().filter(|command| !command.is_hide_set()) {
        page.extend_from_slice(&section(subcommand)?);
    }
    page.extend_from_slice(tables(&extra).as_bytes());
    main.render_version_section(&mut page)?;
    Ok(page)
}

/// One subcommand as a section, with what would be sections of a page of its own as its parts.
fn section(command: clap::Command) -> io::Result<Vec<u8>> {
    let title = format!(".SH \"BEELINE {}\"\n", command.get_name().to_uppercase());
    let man = Man::new(command);
    let mut body = Vec::new();
    man.render_synopsis_section(&mut body)?;
    man.render_description_section(&mut body)?;
    man.render_options_section(&mut body)?;
    let body = String::from_utf8_lossy(&body);
    let mut out = title.into_bytes();
    for line in body.lines() {
        match line.strip_prefix(".SH ") {
            Some(name) => out.extend_from_slice(format!(".SS {name}\n").as_bytes()),
            None => out.extend_from_slice(format!("{line}\n").as_bytes()),
        }
    }
    Ok(out)
}

/// The text behind the help: each heading ("Examples:") becomes a section, its lines stay as they are.
fn tables(text: &str) -> String {
    let mut out = String::new();
    for block in text.split("\n\n") {
        let (heading, lines) = block.split_once('\n').unwrap_or((block, ""));
        let heading = heading.trim_end_matches(':').to_uppercase();
        out.push_str(&format!(".SH \"{}\"\n.nf\n", escape(&heading)));
        for line in lines.lines() {
            out.push_str(&format!("{}\n", escape(line.trim_start())));
        }
        out.push_str(".fi\n");
    }
    out
}

/// Text that roff takes for nothing else: no escape, no control line, no typographic hyphen.
fn escape(line: &str) -> String {
    let text = line.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_never_taken_for_a_request() {
        let page = tables("Examples:\n  .x -a \\\n  plain\n\nMore:\n  'y");
        let expected = ".SH \"EXAMPLES\"\n.nf\n\\&.x \\-a \\e\nplain\n.fi\n\
                        .SH \"MORE\"\n.nf\n\\&'y\n.fi\n";
        assert_eq!(page, expected);
    }
}

//! What a command that failed says, and its exit code.

use beeline::core::model::SelectError;
use beeline::core::reason::Reason;
use serde_json::{Value, json};

use crate::output::one_line;

/// The command did what was asked.
pub(crate) const EXIT_DONE: u8 = 0;
/// Something failed that may work another time or on another machine.
pub(crate) const EXIT_FAILED: u8 = 1;
/// The command line or the input was refused; trying again gives the same answer.
pub(crate) const EXIT_REFUSED: u8 = 2;
/// Added to the number of the signal that ended a command.
pub(crate) const EXIT_SIGNAL: u8 = 128;

/// Why a command did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// A stable name of the cause.
    pub(crate) code: String,
    /// What failed, with which values.
    pub(crate) message: String,
    /// What a person can do about it.
    pub(crate) hint: Option<String>,
    /// Why each route was refused, where no route was left.
    pub(crate) reasons: Vec<Reason>,
    /// The exit code.
    pub(crate) exit: u8,
}

impl Failure {
    /// A failure that may not happen another time.
    pub(crate) fn failed(code: &str, message: impl Into<String>) -> Self {
        Self::new(code, message.into(), EXIT_FAILED)
    }

    /// An argument or input that cannot be accepted.
    pub(crate) fn refused(code: &str, message: impl Into<String>) -> Self {
        Self::new(code, message.into(), EXIT_REFUSED)
    }

    /// The signal `number` ended the command.
    pub(crate) fn interrupted(number: u8) -> Self {
        let text = format!("interrupted by signal {number}; what was in flight has been given up");
        Self::new("cancelled", text, EXIT_SIGNAL.saturating_add(number))
    }

    /// A command line that cannot be understood.
    pub(crate) fn usage(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        let text = text.trim().strip_prefix("error: ").unwrap_or(text.trim());
        let (message, hint) = text.split_once("\n\n").unwrap_or((text, ""));
        let failure = Self::refused("usage", message);
        if hint.is_empty() { failure } else { failure.hint(hint) }
    }

    pub(crate) fn hint(mut self, text: impl Into<String>) -> Self {
        self.hint = Some(text.into());
        self
    }

    fn new(code: &str, message: String, exit: u8) -> Self {
        Self { code: code.to_owned(), message, hint: None, reasons: Vec::new(), exit }
    }

    /// As JSON: `code`, `message`, `hint` (or null), `reasons`.
    pub(crate) fn to_json(&self) -> Value {
        let reasons: Vec<Value> = self.reasons.iter().map(reason_json).collect();
        json!({
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "reasons": reasons,
        })
    }

    /// As text of one or more lines.
    pub(crate) fn to_text(&self) -> String {
        let mut text = one_line(&self.message);
        for reason in &self.reasons {
            text.push_str(&format!("\n  - {}", one_line(&reason.to_string())));
        }
        if let Some(hint) = &self.hint {
            text.push_str(&format!("\n  try: {}", one_line(hint)));
        }
        text
    }
}

/// A reason as JSON: `code`, `text`, `detail` and `remedy`, each empty where there is nothing to say.
pub(crate) fn reason_json(reason: &Reason) -> Value {
    json!({
        "code": reason.code.as_str(),
        "text": reason.code.title(),
        "detail": reason.detail,
        "remedy": reason.code.remedy(),
    })
}

impl From<beeline::Error> for Failure {
    fn from(error: beeline::Error) -> Self {
        let exit = if error.is_refused() { EXIT_REFUSED } else { EXIT_FAILED };
        Self {
            code: error.code().to_owned(),
            message: error.to_string(),
            hint: error.hint().map(str::to_owned),
            reasons: error.reasons().to_vec(),
            exit,
        }
    }
}

impl From<SelectError> for Failure {
    fn from(error: SelectError) -> Self {
        Self::refused(error.code(), error.to_string())
    }
}

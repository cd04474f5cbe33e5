//! Every dependency must come under a licence that both of ours allow.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{Outcome, cargo, output};

/// Licences that may be linked into a work under MIT OR Apache-2.0 without further conditions.
const ALLOWED: &[&str] = &[
    "MIT",
    "MIT-0",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
    "0BSD",
];

pub(crate) fn run(_args: &[String]) -> Outcome {
    let text = output(cargo().args(["metadata", "--format-version", "1", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    let mut refused = BTreeSet::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or("?");
        match package["license"].as_str() {
            Some(licence) if is_allowed(licence) => {}
            licence => {
                refused.insert(format!("{name}: {}", licence.unwrap_or("no licence named")));
            }
        }
    }
    if refused.is_empty() {
        println!("licences of {} packages are allowed", packages.len());
        return Ok(());
    }
    Err(format!("not allowed:\n  {}", refused.into_iter().collect::<Vec<_>>().join("\n  ")))
}

/// Whether an SPDX expression leaves a choice that is allowed: for `OR` one side, for `AND` all.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ").replace(['(', ')'], " ");
    expression
        .split(" AND ")
        .all(|part| part.split(" OR ").any(|licence| ALLOWED.contains(&licence.trim())))
}

#[cfg(test)]
mod tests {
    use super::is_allowed;

    #[test]
    fn choices_and_conditions() {
        let cases = [
            ("MIT", true),
            ("MIT/Apache-2.0", true),
            ("GPL-3.0-only", false),
            ("GPL-2.0-only OR MIT", true),
            ("MIT AND GPL-2.0-only", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("", false),
        ];
        for (expression, expected) in cases {
            assert_eq!(is_allowed(expression), expected, "{expression}");
        }
    }
}

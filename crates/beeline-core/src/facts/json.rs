//! Saving and loading a [`Machine`] as versioned JSON.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use core::fmt;

use serde_json::Value;

use super::machine::{FORMAT_VERSION, Machine};
use super::redact;

/// Largest file that [`load`] accepts, in bytes.
pub const BYTES_MAX: usize = 64 << 20;

/// Why a saved record cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// Line, from 1; 0 where none applies.
    pub line: u32,
    /// What is wrong and what was expected.
    pub message: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

impl core::error::Error for LoadError {}

/// The record as JSON. Unless `personal` is set, host names, addresses, serial numbers, UUIDs and GUIDs
/// are replaced by placeholders that keep their identity within the file.
pub fn save(machine: &Machine, personal: bool) -> Result<String, LoadError> {
    let failed = |error: serde_json::Error| LoadError { line: 0, message: error.to_string() };
    let mut value = serde_json::to_value(machine).map_err(failed)?;
    if !personal {
        redact::redact(&mut value);
    }
    serde_json::to_string_pretty(&value).map_err(failed)
}

/// Reads a record that [`save`] wrote.
pub fn load(text: &str) -> Result<Machine, LoadError> {
    if text.len() > BYTES_MAX {
        let message = alloc::format!("{} bytes, more than the limit of {BYTES_MAX}", text.len());
        return Err(LoadError { line: 0, message });
    }
    let failed = |error: serde_json::Error| LoadError {
        line: u32::try_from(error.line()).unwrap_or(u32::MAX),
        message: alloc::format!("not a saved machine record: {error}"),
    };
    let value: Value = serde_json::from_str(text).map_err(failed)?;
    match value.get("version").and_then(Value::as_u64) {
        Some(version) if version == u64::from(FORMAT_VERSION) => {}
        Some(version) => {
            let message = alloc::format!(
                "record of version {version}; this program reads version {FORMAT_VERSION}"
            );
            return Err(LoadError { line: 0, message });
        }
        None => {
            let message = "not a saved machine record: no \"version\"".to_string();
            return Err(LoadError { line: 0, message });
        }
    }
    serde_json::from_str(text).map_err(failed)
}

/// Serialises a map with structured keys as a list of pairs.
pub(crate) mod as_list {
    use super::BTreeMap;
    use alloc::vec::Vec;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S, K, V>(map: &BTreeMap<K, V>, serializer: S) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
        K: Serialize,
        V: Serialize,
    {
        serializer.collect_seq(map)
    }

    pub(crate) fn deserialize<'de, D, K, V>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
    where
        D: Deserializer<'de>,
        K: Deserialize<'de> + Ord,
        V: Deserialize<'de>,
    {
        Ok(Vec::<(K, V)>::deserialize(deserializer)?.into_iter().collect())
    }
}

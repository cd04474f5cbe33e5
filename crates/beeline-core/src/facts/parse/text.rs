//! Small helpers over lines of text.

/// What follows `needle` in `text`.
pub(super) fn after<'a>(text: &'a str, needle: &str) -> Option<&'a str> {
    let at = text.find(needle)?;
    text.get(at + needle.len()..)
}

/// The unsigned decimal or `0x` number at the start of `text`, blanks skipped.
pub(super) fn number(text: &str) -> Option<u64> {
    let text = text.trim_start();
    if let Some(hex) = text.strip_prefix("0x") {
        let end = hex.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(hex.len());
        return u64::from_str_radix(hex.get(..end)?, 16).ok();
    }
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.get(..end)?.parse().ok()
}

/// The unsigned number that follows `needle`.
pub(super) fn number_after(text: &str, needle: &str) -> Option<u64> {
    number(after(text, needle)?)
}

/// The signed number that follows `needle`.
pub(super) fn signed_after(text: &str, needle: &str) -> Option<i64> {
    let rest = after(text, needle)?.trim_start();
    let (sign, digits) = match rest.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, rest),
    };
    i64::try_from(number(digits)?).ok().map(|value| sign * value)
}

/// The word that follows `needle`: up to a blank, comma, quote or bracket.
pub(super) fn word_after<'a>(text: &'a str, needle: &str) -> Option<&'a str> {
    let rest = after(text, needle)?.trim_start();
    let end = rest
        .find(|c: char| c.is_whitespace() || matches!(c, ',' | '\'' | '"' | ']' | ')' | '>'))
        .unwrap_or(rest.len());
    rest.get(..end).filter(|word| !word.is_empty())
}

/// `key : value` with the blanks around both removed.
pub(super) fn key_value(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once(':')?;
    Some((key.trim(), value.trim()))
}

/// Parses `64`, `64K`, `128M`, `1G`, `256 MiB` as bytes with the default unit given.
pub(super) fn bytes(text: &str, default_unit: u64) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = (text.get(..end)?, text.get(end..)?.trim());
    let unit = match unit.bytes().next() {
        None => default_unit,
        Some(b'B' | b'b') => 1,
        Some(b'K' | b'k') => 1 << 10,
        Some(b'M' | b'm') => 1 << 20,
        Some(b'G' | b'g') => 1 << 30,
        Some(b'T' | b't') => 1 << 40,
        Some(_) => return None,
    };
    match digits.split_once('.') {
        None => digits.parse::<u64>().ok()?.checked_mul(unit),
        Some((whole, fraction)) => {
            let tenth = u64::from(fraction.chars().next()?.to_digit(10)?);
            whole.parse::<u64>().ok()?.checked_mul(unit)?.checked_add(tenth * unit / 10)
        }
    }
}

/// Error number named by the C library's text, for the errors that matter here.
pub(super) fn errno_of(text: &str) -> i32 {
    const NAMES: [(&str, i32); 9] = [
        ("Operation not supported", 95),
        ("Protocol not supported", 93),
        ("Bad address", 14),
        ("Cannot allocate memory", 12),
        ("Invalid argument", 22),
        ("Connection timed out", 110),
        ("Operation not permitted", 1),
        ("No such device", 19),
        ("Permission denied", 13),
    ];
    NAMES.iter().find(|(name, _)| text.contains(name)).map_or(0, |(_, number)| *number)
}

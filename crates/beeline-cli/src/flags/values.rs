//! How the values of flags are read.

use std::str::FromStr;
use std::time::Duration;

use beeline::config::parse_bytes;
use beeline::core::plan::{Mode, StorageRoute};
use beeline::probe::Fault;
use beeline::verbs::LinkKind;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

pub(super) fn mode_parser() -> impl TypedValueParser<Value = Mode> {
    let help = |mode| match mode {
        Mode::Require => "straight hardware paths only (or the route named), an error otherwise",
        Mode::Auto => "the best route that is open",
        Mode::Software => "plain system calls and host memory only",
    };
    named(Mode::ALL.map(|mode| PossibleValue::new(mode.as_str()).help(help(mode))))
}

pub(super) fn route_parser() -> impl TypedValueParser<Value = StorageRoute> {
    let value = |route: StorageRoute| PossibleValue::new(route.as_str()).help(route.describe());
    named(StorageRoute::ALL.map(value))
}

/// Parses one of `values` by the `FromStr` of `T`, which knows the same names.
fn named<T, const N: usize>(values: [PossibleValue; N]) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(values)
        .try_map(|text| text.parse::<T>().map_err(|_| "this name is unknown"))
}

pub(super) fn link_parser() -> impl TypedValueParser<Value = LinkKind> {
    let values = [
        PossibleValue::new("udp").help("a UDP socket: no privilege, over IPv4 a weaker check"),
        PossibleValue::new("raw").help("with a raw socket: the full check, needs CAP_NET_RAW"),
    ];
    PossibleValuesParser::new(values)
        .map(|text| if text == "raw" { LinkKind::Raw } else { LinkKind::Udp })
}

pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    parse_bytes(text)
        .ok_or_else(|| "write a whole number of bytes, as 4096, 64M or 2GiB".to_owned())
}

pub(super) fn parse_io(text: &str) -> Result<u64, String> {
    let fits = parse_bytes(text).filter(|bytes| (1..=1 << 30).contains(bytes));
    fits.ok_or_else(|| "write a number of bytes from 1 to 1G, as 4096 or 1M".to_owned())
}

pub(super) fn parse_transfer(text: &str) -> Result<u8, String> {
    match text {
        "0" => Ok(0),
        "2" => Ok(2),
        "6" => Ok(6),
        "1" | "3" | "4" | "5" | "7" => {
            Err("this transfer type is not measured here: 0, 2 or 6".into())
        }
        _ => Err("write 0, 2 or 6".to_owned()),
    }
}

pub(super) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok();
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|span| !span.is_zero())
        .ok_or_else(|| "write a number of seconds above 0, as 30 or 0.5".to_owned())
}

pub(super) fn parse_fault(text: &str) -> Result<(usize, Fault), String> {
    let parse = |(at, kind): (&str, &str)| {
        let fault = match kind {
            "stall" => Fault::Stall,
            "corrupt" => Fault::Corrupt,
            "fail" => Fault::Fail,
            _ => return None,
        };
        Some((at.parse().ok()?, fault))
    };
    text.split_once(':').and_then(parse).ok_or_else(|| "write N:stall, N:corrupt or N:fail".into())
}

pub(super) fn parse_rows(text: &str) -> Result<(u64, u64), String> {
    text.split_once("..")
        .and_then(|(start, end)| Some((start.parse().ok()?, end.parse().ok()?)))
        .ok_or_else(|| "write two row numbers, as 0..128".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_exactly_or_refused() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["", "0", "-1", "nan", "inf", "1e300", "1s"] {
            assert!(parse_seconds(text).is_err(), "{text:?}");
        }
        assert_eq!(parse_rows("3..7"), Ok((3, 7)));
        for text in ["", "3", "3..", "..7", "3..7..9", "-1..2"] {
            assert!(parse_rows(text).is_err(), "{text:?}");
        }
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert!(parse_size("lots").is_err());
    }
}

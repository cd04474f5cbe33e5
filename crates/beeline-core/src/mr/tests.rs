use super::*;
use proptest::prelude::*;

const PD: PdId = PdId(1);

fn table() -> MrTable {
    MrTable::new(8, Secret::new([11, 12]))
}

fn region(access: Access) -> Registration {
    Registration { pd: PD, iova: Iova::new(0x1000), len: 100, access, kind: MemoryKind::Host }
}

fn ask(key: Lkey, iova: u64, len: u32, need: Need) -> Ask {
    Ask { pd: PD, key: key.as_u32(), iova: Iova::new(iova), len, need }
}

#[test]
fn each_rule_refuses_by_itself() {
    let mut mrs = table();
    let key = mrs.register(region(Access::LOCAL_WRITE | Access::REMOTE_READ)).unwrap().lkey;
    let why = |mrs: &mut MrTable, ask| mrs.check(ask).map_err(|error| error.why);
    let bounds = Refusal::OutOfBounds { start: Iova::new(0x1000), len: 100 };

    assert_eq!(why(&mut mrs, ask(key, 0x1000, 100, Need::RemoteRead)), Ok(()));
    assert_eq!(why(&mut mrs, ask(key, 0x1064, 0, Need::LocalWrite)), Ok(()));
    for (iova, len) in [(0x0fff, 1), (0x1000, 101), (0x1063, 2), (0x1065, 0), (u64::MAX, 8)] {
        assert_eq!(why(&mut mrs, ask(key, iova, len, Need::LocalRead)), Err(bounds));
    }
    for (need, right) in
        [(Need::RemoteWrite, Access::REMOTE_WRITE), (Need::RemoteAtomic, Access::REMOTE_ATOMIC)]
    {
        let refusal = Err(Refusal::MissingRight { right });
        assert_eq!(why(&mut mrs, ask(key, 0x1000, 8, need)), refusal);
    }
    let other = Ask { pd: PdId(2), ..ask(key, 0x1000, 1, Need::LocalRead) };
    assert_eq!(why(&mut mrs, other), Err(Refusal::OtherPd));
    let wrong = Lkey::new(key.as_u32() ^ 1);
    assert_eq!(why(&mut mrs, ask(wrong, 0x1000, 1, Need::LocalRead)), Err(Refusal::UnknownKey));
    assert_eq!(mrs.revoke(key), Some(0));
    assert_eq!(why(&mut mrs, ask(key, 0x1000, 1, Need::LocalRead)), Err(Refusal::Revoked));
}

#[test]
fn a_key_dies_with_its_region_and_is_never_given_out_again() {
    let mut mrs = table();
    let mut seen = alloc::collections::BTreeSet::new();
    for _ in 0..1000 {
        let key = mrs.register(region(Access::ALL)).unwrap().lkey;
        assert!(seen.insert(key), "{key} was given out twice");
        mrs.deregister(key).unwrap();
        let stale = mrs.check(ask(key, 0x1000, 1, Need::LocalRead)).unwrap_err();
        assert_eq!(stale.why, Refusal::UnknownKey);
        assert_eq!(mrs.deregister(key), Err(DeregisterError::Unknown { lkey: key }));
        // The same once another region lives in its slot.
        let next = mrs.register(region(Access::ALL)).unwrap();
        let stale = mrs.check(ask(key, 0x1000, 1, Need::LocalRead)).unwrap_err();
        assert_eq!(stale.why, Refusal::UnknownKey);
        assert_eq!((mrs.revoke(key), mrs.in_flight(key), mrs.hold(key)), (None, None, false));
        assert!(seen.insert(next.lkey));
        mrs.deregister(next.lkey).unwrap();
    }
}

#[test]
fn deregistration_waits_for_posted_requests_and_for_accesses() {
    let mut mrs = table();
    let key = mrs.register(region(Access::ALL)).unwrap().lkey;
    assert!(mrs.hold(key));
    let grant = mrs.grant(ask(key, 0x1000, 4, Need::RemoteWrite)).unwrap();
    let busy = |posted, in_flight| Err(DeregisterError::Busy { lkey: key, posted, in_flight });
    assert_eq!(mrs.deregister(key), busy(1, 1));
    assert_eq!(mrs.revoke(key), Some(1), "the access under way is still to be waited for");
    mrs.unhold(key);
    assert_eq!(mrs.deregister(key), busy(0, 1));
    mrs.release(grant);
    assert_eq!(mrs.deregister(key), Ok(()));
    assert!(!mrs.hold(key));
}

#[test]
fn registrations_that_make_no_sense_are_refused() {
    let mut mrs = table();
    let with = |iova, len, access| Registration { iova: Iova::new(iova), len, ..region(access) };
    assert!(matches!(mrs.register(with(0, 0, Access::ALL)), Err(RegisterError::Length { len: 0 })));
    assert!(matches!(
        mrs.register(with(u64::MAX, 2, Access::ALL)),
        Err(RegisterError::Wraps { .. })
    ));
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC | Access::REMOTE_READ] {
        let refused = mrs.register(with(0, 8, access));
        assert_eq!(refused, Err(RegisterError::NeedsLocalWrite { access }));
    }
    for _ in 0..8 {
        mrs.register(region(Access::LOCAL_READ)).unwrap();
    }
    assert_eq!(
        mrs.register(region(Access::LOCAL_READ)),
        Err(RegisterError::TableFull { limit: 8 })
    );
}

proptest! {
    #[test]
    fn a_grant_never_reaches_outside_its_region(
        start in any::<u64>(), len in 1u64..1 << 40, at in any::<u64>(), bytes in any::<u32>(),
    ) {
        let mut mrs = table();
        let wanted = Registration { iova: Iova::new(start), len, ..region(Access::ALL) };
        let Ok(registered) = mrs.register(wanted) else { return Ok(()) };
        for at in [at, start.wrapping_add(at % len), start.wrapping_add(len)] {
            if let Ok(grant) = mrs.grant(ask(registered.lkey, at, bytes, Need::RemoteWrite)) {
                let segment = grant.segment();
                prop_assert!(segment.range().end() <= len);
                prop_assert_eq!(start + segment.offset, at);
                mrs.release(grant);
            }
        }
    }
}

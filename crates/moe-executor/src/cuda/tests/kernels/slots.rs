//! The search for the slots of selected experts.

use moe_placement::random::SplitMix64;
use moe_testkit::Report;

use crate::cuda::launch::FindSlots;
use crate::cuda::tests::device::Device;

/// Content of outputs before the launch.
const UNSET: u32 = 0xdead;

/// The outputs of a search. The kernel writes nothing after their end.
#[derive(Debug, PartialEq)]
struct Found {
    slots: Vec<i32>,
    /// Number of experts without a slot, then the experts.
    mail: Vec<u32>,
    mailed: u32,
    go: u32,
}

/// A search and its inputs. The experts of a search are less than the length of the table.
struct Case {
    ids: Vec<i32>,
    table: Vec<i32>,
    dummy: usize,
    number: u32,
}

impl Case {
    /// What the kernel must find.
    fn expected(&self) -> Found {
        let slot_of = |&id: &i32| usize::try_from(self.table[id as usize]).ok();
        let slots = self.ids.iter().map(slot_of);
        let missing = slots.clone().filter(Option::is_none).count();
        let ids = self.ids.iter().map(|id| id.cast_unsigned());
        let slots = slots.map(|slot| slot.unwrap_or(self.dummy) as i32);
        Found {
            slots: slots.chain([UNSET.cast_signed()]).collect(),
            mail: [missing as u32]
                .into_iter()
                .chain(ids)
                .chain([UNSET])
                .collect(),
            mailed: self.number,
            go: if missing == 0 { self.number } else { UNSET },
        }
    }

    fn run(&self, device: &Device) -> Result<Found, String> {
        let k = self.ids.len();
        let (ids, table) = (device.upload(&self.ids), device.upload(&self.table));
        let slots = device.upload(&vec![UNSET.cast_signed(); k + 1]);
        let mail = device.upload(&vec![UNSET; k + 2]);
        let [mailed, go] = [UNSET; 2].map(|word| device.upload(&[word]));
        let search = FindSlots {
            ids: device.at(&ids),
            table: device.at(&table),
            k,
            dummy: self.dummy,
            number: self.number,
            slots: device.at(&slots),
            mail: device.at(&mail),
            mailed: device.at(&mailed),
            go: device.at(&go),
        };
        let done = device.kernels.find_slots(&device.stream, &search);
        done.map_err(|error| error.to_string())?;
        Ok(Found {
            slots: device.download(&slots)?,
            mail: device.download(&mail)?,
            mailed: device.download(&mailed)?[0],
            go: device.download(&go)?[0],
        })
    }
}

/// A warp has 32 threads: there are fewer experts, as many, and more. Experts are found with all, some and none of them in slots.
#[test]
fn finds_the_slots_of_selected_experts() {
    let Some(device) = Device::open() else { return };
    let mut report = Report::default();
    let mut random = SplitMix64::new(12);
    for k in 1..=100 {
        for percent in [0, 50, 90, 100] {
            let n_expert = k + random.below(40) + 1;
            let mut experts: Vec<i32> = (0..n_expert as i32).collect();
            for last in (1..n_expert).rev() {
                experts.swap(last, random.below(last + 1));
            }
            let table = (0..n_expert).map(|_| {
                let has_slot = random.below(100) < percent;
                if has_slot {
                    random.below(1000) as i32
                } else {
                    -1
                }
            });
            let case = Case {
                table: table.collect(),
                ids: experts[..k].to_vec(),
                dummy: 1000,
                number: random.below(1 << 31) as u32,
            };
            let what = format!("{k} of {n_expert} experts, {percent} % in slots");
            match case.run(device) {
                Ok(found) if found == case.expected() => {}
                Ok(found) => report.fail(format!("{what}: {found:?}, not {:?}", case.expected())),
                Err(error) => report.fail(format!("{what}: {error}")),
            }
        }
    }
    report.finish();
}

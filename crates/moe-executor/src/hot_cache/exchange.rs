//! Exchanges of cached experts between two requests.

use moe_gguf::ExpertId;
use moe_placement::perf::LaneIndex;
use moe_placement::update::Exchange;

use super::HotCache;
use super::worklist::Place;
use crate::devices::Devices;
use crate::model::Model;

impl HotCache {
    /// Copies the experts to add over those to evict, in the lanes and slots of the latter. Returns the number of completed
    /// exchanges. An exchange has no effect if the expert to evict is not cached, or if the expert to add is cached or does
    /// not exist. If a copy fails, the expert to evict is no longer cached; the CPU computes both.
    pub(crate) fn exchange(
        &mut self,
        model: &Model,
        devices: &mut Devices,
        exchanges: &[Exchange],
    ) -> usize {
        let done = exchanges
            .iter()
            .filter(|exchange| self.apply(model, devices, exchange));
        done.count()
    }

    fn apply(&mut self, model: &Model, devices: &mut Devices, exchange: &Exchange) -> bool {
        let &Exchange {
            layer, evict, add, ..
        } = exchange;
        let Some(moe) = model.decoder.moe(layer) else {
            return false;
        };
        let cache = self.layers.get_mut(layer.index());
        let Some(cache) = cache.and_then(Option::as_mut) else {
            return false;
        };
        let place = |expert: ExpertId| cache.places.get(expert.index()).copied();
        let (Some(from), Some(to)) = (place(evict), place(add)) else {
            return false;
        };
        let (Some(lane), None) = (from.lane.hot_index(), to.lane.hot_index()) else {
            return false;
        };
        let Some(part) = &mut cache.lanes[lane] else {
            return false;
        };
        let (slot, Some(projections)) = (from.index as usize, moe.projections()) else {
            return false;
        };
        let copied = match (&mut part.on_cpu, devices.gpu_mut(self.devices[lane])) {
            (Some(copies), _) => {
                for (copy, linear) in copies.iter_mut().zip(projections) {
                    copy.replace(linear, slot, add);
                }
                Ok(())
            }
            (None, Some(gpu)) => gpu.replace_hot(lane, projections, slot, add),
            (None, None) => return false,
        };
        cache.places[evict.index()] = Place::cold(evict.index());
        if let Err(error) = copied {
            part.experts[slot] = None;
            self.events.failed_exchanges += 1;
            let first = &mut self.events.first_failure;
            first.get_or_insert_with(|| error.to_string());
            self.counters.lock().add_fallback(layer);
            return false;
        }
        part.experts[slot] = Some(add);
        let index = from.index;
        cache.places[add.index()] = Place {
            lane: LaneIndex::HOT[lane],
            index,
        };
        true
    }
}

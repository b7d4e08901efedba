// What Grafana's schema package says of a dashboard, as far as ours has it; text where the types have an enumeration.
import type { Dashboard, Panel, RowPanel } from "@grafana/schema";
import type { Options as StatOptions } from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type { FieldConfig, Options as TimeSeriesOptions } from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

type Loose<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T : T extends object ? { [K in keyof T]: Loose<T[K]> } : T;
type Partly<T> = T extends object ? { [K in keyof T]?: Partly<T[K]> } : T;
type Source = { type: "prometheus"; uid: string };
// The package has no types of Prometheus' queries and annotations: these are the fields that Grafana's data source reads.
interface Query { refId: string; expr: string; legendFormat?: string; instant?: boolean; range?: boolean; interval?: string; datasource?: Source }
interface Annotation { name: string; enable: boolean; iconColor: string; datasource: Source; target: Query; textFormat?: string; titleFormat?: string; tagKeys?: string }
type Of<Name extends string, Options, Custom> = Omit<Panel<Partly<Options>, Partly<Custom>>, "type" | "targets" | "options"> & { type: Name; targets: Query[]; options: Partly<Options> };
type Shown = Of<"stat", StatOptions, object> | Of<"timeseries", TimeSeriesOptions, FieldConfig> | RowPanel;
export type Checked = Loose<Omit<Dashboard, "panels" | "annotations">> & { panels: Loose<Shown>[]; annotations: { list: Annotation[] } };
